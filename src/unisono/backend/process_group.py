"""A process group of torch.distributed in which Unisono carries the tensors of the CPU.

done here          all_reduce, reduce, reduce_scatter, all_gather, broadcast, barrier
passed on to Gloo  gather, scatter, all_to_all, send, recv; bitwise operations, reductions of bool;
                   wrong arguments, for which Gloo raises
passed on          tensors of other devices, to the backend that the program names for them
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    DebugLevel,
    PrefixStore,
    ReduceOptions,
    ReduceScatterOptions,
    Store,
    Work,
    get_debug_level,
)

from unisono.backend import collectives, well_formed
from unisono.backend.arguments import listed, listed_twice, options
from unisono.backend.detail import check_same_call
from unisono.backend.engine import Engine
from unisono.backend.other_devices import make_backend
from unisono.communicators import Communicator
from unisono.errors import UnsupportedError
from unisono.options import ReduceOp

# Its type stubs tell calls apart, by overloads, that are one here.
_ProcessGroup: Any = distributed.ProcessGroup

Movement: TypeAlias = Callable[[Communicator], None]
Reduction: TypeAlias = Callable[[Communicator, ReduceOp], None]


def _passed_on(name: str) -> Callable[..., Work]:
    """A method of the backend for the device of the tensors."""

    def pass_on(self: UnisonoProcessGroup, *args: Any, **options: Any) -> Work:
        return self._pass_on(name, *args, **options)

    pass_on.__doc__ = f"Lets another backend do `{name}`."
    return pass_on


class UnisonoProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group that `init_process_group("unisono")` creates, on all ranks at once.

    Args:
        store: Where the ranks meet.
        rank: Which rank this is.
        size: How many there are.
        timeout: How long to wait for other ranks, now and in each collective.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # A launcher keeps its store when a program ends its group and makes another.
        visit = store.add(f"visits of rank {rank}", 1)
        self._store = PrefixStore(f"visit {visit}", store)
        self._timeout = timeout
        self._others = distributed.ProcessGroup(self._store, rank, size)
        self._is_detailed = get_debug_level() == DebugLevel.DETAIL
        self._is_lent = False
        self._engine = Engine(PrefixStore("engine", self._store), rank, size, timeout)
        try:
            # Not when it is first needed: two ranks that send and receive would need the others.
            self._gloo = self._backend_for(torch.device("cpu"))
            self._gloo_timeout = self._gloo.options._timeout
        except BaseException:
            self._engine.close()
            raise

    def getBackendName(self) -> str:
        """The name that torch shows."""
        return "unisono"

    def shutdown(self) -> None:
        """Ends the group when everything that was begun has ended. May be called twice."""
        self._engine.close()
        super().shutdown()

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> UnisonoProcessGroup | None:
        """Returns a group of some ranks of this one, or None on the others."""
        ranks = sorted(new_ranks)
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        store, rank = PrefixStore(f"{name}/", self._store), ranks.index(self.rank())
        group = UnisonoProcessGroup(store, rank, len(ranks), timeout or self._timeout)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were begun, here and by the other backends."""
        others: int = super()._get_sequence_number_for_group()
        return self._engine.num_begun + others

    def get_group_store(self) -> Store:
        """Where the ranks of this group meet."""
        return self._store

    # Collectives that are done here. Their names and signatures are those that torch calls.

    def allreduce(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, *, op: Any = None
    ) -> Work:
        """Overwrites each tensor with the combination of all tensors of all ranks."""
        tensors = listed(tensors)
        opts = options(AllreduceOptions, opts, reduceOp=op)
        return self._reduction(
            lambda communicator, op: collectives.all_reduce(communicator, op, tensors),
            tensors if well_formed.alike(tensors) else None,
            "allreduce",
            tensors,
            opts,
            or_sparse=len(tensors) == 1,
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Overwrites each tensor with the combination of those at its place on all ranks."""
        return self._reduction(
            lambda communicator, op: collectives.all_reduce_coalesced(communicator, op, tensors),
            tensors if well_formed.of_one_kind(tensors) else None,
            "allreduce_coalesced",
            tensors,
            opts or AllreduceCoalescedOptions(),
        )

    def reduce(
        self,
        tensors: list[Tensor] | Tensor,
        opts: Any = None,
        op: Any = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Overwrites the tensor of one rank with the combination of those of all ranks."""
        tensors = listed(tensors)
        opts = options(ReduceOptions, opts, rootRank=root, reduceOp=op)
        root = opts.rootRank
        return self._reduction(
            lambda communicator, op: collectives.reduce(communicator, op, tensors[0], root),
            tensors if len(tensors) == 1 and self._has_root(opts, tensors) else None,
            "reduce",
            tensors,
            opts,
        )

    def broadcast(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, *, root: int | None = None
    ) -> Work:
        """Overwrites each tensor with one of one rank."""
        tensors = listed(tensors)
        opts = options(BroadcastOptions, opts, rootRank=root)
        root, position = opts.rootRank, opts.rootTensor
        return self._movement(
            lambda communicator: collectives.broadcast(communicator, tensors, root, position),
            tensors if well_formed.alike(tensors) and self._has_root(opts, tensors) else None,
            "broadcast",
            tensors,
            opts,
        )

    def allgather(
        self,
        output_tensors: list[list[Tensor]] | list[Tensor],
        input_tensors: list[Tensor] | Tensor,
        opts: Any = None,
    ) -> Work:
        """Fills a list with the tensors of all ranks."""
        lists, inputs = listed_twice(output_tensors), listed(input_tensors)
        is_ours = well_formed.listed_by_rank(lists, inputs, self.size())
        return self._movement(
            lambda communicator: collectives.all_gather(communicator, lists[0], inputs[0]),
            lists[0] if is_ours and well_formed.alike([*inputs, *lists[0]]) else None,
            "allgather",
            lists,
            inputs,
            opts or AllgatherOptions(),
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fills the output with the inputs of all ranks, one after the other."""
        return self._all_gather_single([output], [input], "_allgather_base", output, input, opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Fills each output with the inputs of all ranks, one after the other."""
        name = "allgather_into_tensor_coalesced"
        return self._all_gather_single(outputs, inputs, name, outputs, inputs, opts)

    def _all_gather_single(
        self, outputs: list[Tensor], inputs: list[Tensor], name: str, *args: Any
    ) -> Work:
        *given, opts = args
        return self._movement(
            lambda communicator: collectives.all_gather_single(communicator, outputs, inputs),
            outputs if well_formed.in_parts(outputs, inputs, self.size()) else None,
            name,
            *given,
            opts or AllgatherOptions(),
        )

    def reduce_scatter(
        self,
        output_tensors: list[Tensor] | Tensor,
        input_tensors: list[list[Tensor]] | list[Tensor],
        opts: Any = None,
        *,
        op: Any = None,
    ) -> Work:
        """Combines one input for each rank, and fills the output with the one for this rank."""
        outputs, lists = listed(output_tensors), listed_twice(input_tensors)
        opts = options(ReduceScatterOptions, opts, reduceOp=op)
        is_ours = (
            well_formed.listed_by_rank(lists, outputs, self.size())
            and well_formed.of_one_kind([*outputs, *lists[0]])
            and outputs[0].numel() == lists[0][self.rank()].numel()
        )
        return self._reduction(
            lambda communicator, op: collectives.reduce_scatter(
                communicator, op, outputs[0], lists[0]
            ),
            outputs if is_ours else None,
            "reduce_scatter",
            outputs,
            lists,
            opts,
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Combines the inputs, and fills the output with the part of this rank."""
        name = "_reduce_scatter_base"
        return self._reduce_scatter_single([output], [input], name, output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Combines each input, and fills each output with the part of this rank."""
        name = "reduce_scatter_tensor_coalesced"
        return self._reduce_scatter_single(outputs, inputs, name, outputs, inputs, opts)

    def _reduce_scatter_single(
        self, outputs: list[Tensor], inputs: list[Tensor], name: str, *args: Any
    ) -> Work:
        *given, opts = args
        return self._reduction(
            lambda communicator, op: collectives.reduce_scatter_single(
                communicator, op, outputs, inputs
            ),
            outputs if well_formed.in_parts(inputs, outputs, self.size()) else None,
            name,
            *given,
            opts or ReduceScatterOptions(),
        )

    def barrier(self, opts: Any = None) -> Work:
        """Waits for all ranks."""
        opts = opts or BarrierOptions()
        if opts.device is not None and opts.device.type != "cpu":
            self._backend_for(opts.device)
            return self._others.barrier(opts)
        return self._begin(lambda communicator: communicator.barrier(), [], "barrier", opts)

    # What torch calls them before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Collectives that are never done here.
    allgather_coalesced = _passed_on("allgather_coalesced")
    alltoall = _passed_on("alltoall")
    alltoall_base = _passed_on("alltoall_base")
    all_to_all_single = alltoall_base
    gather = _passed_on("gather")
    scatter = _passed_on("scatter")

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Lets another backend send."""
        return self._message("send", tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Lets another backend receive."""
        return self._message("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Lets another backend receive."""
        return self._message("recv_anysource", tensors, tag)

    def _has_root(self, opts: Any, tensors: list[Tensor]) -> bool:
        has_root: bool = 0 <= opts.rootRank < self.size() and 0 <= opts.rootTensor < len(tensors)
        return has_root

    def _reduction(
        self,
        call: Reduction,
        outputs: list[Tensor] | None,
        name: str,
        *args: Any,
        or_sparse: bool = False,
    ) -> Work:
        """Does `call`, or what others call `name(*args)` if it cannot be done here.

        `outputs` is None where the arguments are not those of an ordinary call.
        """
        op = None
        if outputs is not None:
            op = collectives.reducible_op(args[-1].reduceOp, outputs, or_sparse=or_sparse)
        if op is None or outputs is None:
            return self._pass_on(name, *args)
        return self._begin(lambda communicator: call(communicator, op), outputs, name, args[-1])

    def _movement(
        self, call: Movement, outputs: list[Tensor] | None, name: str, *args: Any
    ) -> Work:
        if outputs is None or not collectives.are_dense(outputs):
            return self._pass_on(name, *args)
        return self._begin(call, outputs, name, args[-1])

    def _begin(self, call: Movement, outputs: list[Tensor], name: str, opts: Any) -> Work:
        if self._is_lent:
            self._follow_gloo()
        return self._engine.begin(call, outputs, name, opts)

    def _message(self, name: str, tensors: list[Tensor], *args: int) -> Work:
        if len(args) == 2 and not 0 <= args[0] < self.size():
            # Gloo would end the process.
            raise UnsupportedError(
                f"`{name}` needs a rank from 0 to {self.size() - 1}, got {args[0]}."
            )
        self._backend_for(tensors[0].device)
        work: Work = getattr(self._others, name)(tensors, *args)
        return work

    def _pass_on(self, name: str, *args: Any, **options: Any) -> Work:
        tensors = list(collectives.tensors_in([*args, *options.values()]))
        device = tensors[0].device if tensors else torch.device("cpu")
        self._backend_for(device)
        if self._is_detailed and device.type == "cpu":
            self._begin(
                lambda communicator: check_same_call(communicator, name, tensors, args[-1]),
                [],
                name,
                BarrierOptions(),
            ).wait()
        work: Work = getattr(self._others, name)(*args, **options)
        return work

    def _get_backend(self, device: torch.device) -> Any:
        """Returns the backend for tensors on `device` that are not carried here.

        `_set_pg_timeout` sets the timeout of that backend, so ours follows it.
        """
        self._is_lent = True
        return self._backend_for(device)

    def _follow_gloo(self) -> None:
        self._is_lent = False
        timeout = self._gloo.options._timeout
        if timeout != self._gloo_timeout:
            self._gloo_timeout = self._engine.timeout = timeout

    def _backend_for(self, device: torch.device) -> Any:
        """Returns the backend for tensors on `device` that are not carried here."""
        if device.type not in [known.type for known in self._others._device_types]:
            kind, backend = make_backend(self, device, self._store, self._timeout)
            for group in (self, self._others):
                group._register_backend(device, kind, backend)
                group._set_default_backend(kind)
        return self._others._get_backend(device)
