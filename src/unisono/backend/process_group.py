"""A process group of torch.distributed in which Unisono carries the tensors of the CPU.

done here          all_reduce, reduce, reduce_scatter, all_gather, broadcast, barrier
passed on to Gloo  gather, scatter, all_to_all, send, recv; sparse tensors; bitwise operations
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
    PrefixStore,
    ReduceOptions,
    ReduceScatterOptions,
    Store,
    Work,
)

from unisono.backend import collectives
from unisono.backend.arguments import listed, listed_twice, options
from unisono.backend.lane import Lane
from unisono.backend.other_devices import make_backend
from unisono.backend.recorded import traced
from unisono.backend.work import CollectiveWork
from unisono.communicators import Communicator, connect
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
    """What `init_process_group("unisono")` makes. Every rank makes it at the same time.

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
        self._backends: list[Any] = []
        self._lane = Lane(f"unisono-backend-{rank}")
        engine = PrefixStore("engine", self._store)
        seconds = timeout.total_seconds()
        self._communicator = connect(engine, rank, size, timeout_seconds=seconds)
        try:
            self._communicator = traced(self._communicator)
            # Not when it is first needed: two ranks that send and receive would need the others.
            self._get_backend(torch.device("cpu"))
        except BaseException:
            self._communicator.close()
            raise

    def getBackendName(self) -> str:
        """The name that torch shows."""
        return "unisono"

    def shutdown(self) -> None:
        """Ends the group when everything that was begun has ended. May be called twice."""
        self._lane.close()
        self._communicator.close()
        super().shutdown()

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> UnisonoProcessGroup | None:
        """Returns a group of some of the ranks, each of which calls this; None on other ranks.

        `opts` and `device_types`, which torch passes too, are for backends in C++.
        """
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'-'.join(map(str, new_ranks))}"
        store, place = PrefixStore(name, self._store), new_ranks.index(self.rank())
        part = UnisonoProcessGroup(store, place, len(new_ranks), timeout or self._timeout)
        part._set_group_name(name)
        part._set_group_desc(group_desc or name)
        return part

    def get_group_store(self) -> Store:
        """Where the ranks of this group meet."""
        return self._store

    # Collectives that are done here. Their names and signatures are those that torch calls.

    def allreduce(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, *, op: Any = None
    ) -> Work:
        """Overwrites the tensor with the combination of those of all ranks."""
        opts = options(AllreduceOptions, opts, reduceOp=op)
        return self._all_reduce("allreduce", listed(tensors), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Overwrites each tensor with the combination of those of all ranks."""
        return self._all_reduce("allreduce_coalesced", tensors, opts or AllreduceCoalescedOptions())

    def _all_reduce(self, name: str, tensors: list[Tensor], opts: Any) -> Work:
        return self._reduction(
            lambda communicator, op: collectives.all_reduce(communicator, op, tensors),
            tensors,
            name,
            tensors,
            opts,
            or_sparse=True,
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
        return self._reduction(
            lambda communicator, op: collectives.reduce(
                communicator, op, tensors[0], opts.rootRank
            ),
            tensors,
            "reduce",
            tensors,
            opts,
        )

    def broadcast(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, *, root: int | None = None
    ) -> Work:
        """Overwrites the tensor with that of one rank."""
        tensors = listed(tensors)
        opts = options(BroadcastOptions, opts, rootRank=root)
        return self._movement(
            lambda communicator: collectives.broadcast(communicator, tensors[0], opts.rootRank),
            tensors,
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
        output_tensors, input_tensors = listed_twice(output_tensors), listed(input_tensors)
        opts = opts or AllgatherOptions()
        outputs, tensor = output_tensors[0], input_tensors[0]
        return self._movement(
            lambda communicator: collectives.all_gather(communicator, outputs, tensor),
            outputs,
            "allgather",
            output_tensors,
            input_tensors,
            opts,
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fills the output with the inputs of all ranks, one after the other."""
        opts = opts or AllgatherOptions()
        return self._movement(
            lambda communicator: collectives.all_gather_single(communicator, [output], [input]),
            [output],
            "_allgather_base",
            output,
            input,
            opts,
        )

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Fills each output with the inputs of all ranks, one after the other."""
        opts = opts or AllgatherOptions()
        return self._movement(
            lambda communicator: collectives.all_gather_single(communicator, outputs, inputs),
            outputs,
            "allgather_into_tensor_coalesced",
            outputs,
            inputs,
            opts,
        )

    def reduce_scatter(
        self,
        output_tensors: list[Tensor] | Tensor,
        input_tensors: list[list[Tensor]] | list[Tensor],
        opts: Any = None,
        *,
        op: Any = None,
    ) -> Work:
        """Combines one input for each rank, and fills the output with that of this rank."""
        output_tensors, input_tensors = listed(output_tensors), listed_twice(input_tensors)
        opts = options(ReduceScatterOptions, opts, reduceOp=op)
        output, inputs = output_tensors[0], input_tensors[0]
        return self._reduction(
            lambda communicator, op: collectives.reduce_scatter(communicator, op, output, inputs),
            output_tensors,
            "reduce_scatter",
            output_tensors,
            input_tensors,
            opts,
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Combines the inputs, and fills the output with the part of this rank."""
        opts = opts or ReduceScatterOptions()
        return self._reduction(
            lambda communicator, op: collectives.reduce_scatter_single(
                communicator, op, [output], [input]
            ),
            [output],
            "_reduce_scatter_base",
            output,
            input,
            opts,
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Combines each input, and fills each output with the part of this rank."""
        opts = opts or ReduceScatterOptions()
        return self._reduction(
            lambda communicator, op: collectives.reduce_scatter_single(
                communicator, op, outputs, inputs
            ),
            outputs,
            "reduce_scatter_tensor_coalesced",
            outputs,
            inputs,
            opts,
        )

    def barrier(self, opts: Any = None) -> Work:
        """Waits for all ranks."""
        opts = opts or BarrierOptions()
        if opts.device is not None and opts.device.type != "cpu":
            self._get_backend(opts.device)
            return self._others.barrier(opts)
        return self._begin(lambda: self._communicator.barrier(), [], "barrier", opts)

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
    recv = _passed_on("recv")
    recv_anysource = _passed_on("recv_anysource")
    scatter = _passed_on("scatter")
    send = _passed_on("send")

    def _reduction(
        self,
        call: Reduction,
        outputs: list[Tensor],
        name: str,
        *args: Any,
        or_sparse: bool = False,
    ) -> Work:
        """Does `call`, or where it cannot be done here, what others call `name(*args)`."""
        op = collectives.reducible_op(args[-1].reduceOp, outputs, or_sparse=or_sparse)
        if op is None:
            return self._pass_on(name, *args)
        return self._begin(lambda: call(self._communicator, op), outputs, name, args[-1])

    def _movement(self, call: Movement, outputs: list[Tensor], name: str, *args: Any) -> Work:
        if not collectives.are_dense(outputs):
            return self._pass_on(name, *args)
        return self._begin(lambda: call(self._communicator), outputs, name, args[-1])

    def _begin(self, call: Callable[[], None], outputs: list[Tensor], name: str, opts: Any) -> Work:
        work = CollectiveWork(name, call, outputs)
        # Older versions of torch do not say whether it is awaited.
        self._lane.run(work, is_awaited=not getattr(opts, "asyncOp", True))
        return work

    def _pass_on(self, name: str, *args: Any, **options: Any) -> Work:
        self._get_backend(next(collectives.tensors_in(args)).device)
        work: Work = getattr(self._others, name)(*args, **options)
        return work

    def _get_backend(self, device: torch.device) -> Any:
        """Returns who carries tensors on `device` that are not carried here."""
        if device.type not in [known.type for known in self._others._device_types]:
            kind, backend = make_backend(self, device, self._store, self._timeout)
            # torch keeps the backend, but not its Python object, which keeps Gloo's device.
            self._backends.append(backend)
            for group in (self, self._others):
                group._register_backend(device, kind, backend)
                group._set_default_backend(kind)
        return self._others._get_backend(device)
