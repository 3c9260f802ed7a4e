"""A process group of torch.distributed whose collectives a communicator does.

done here  all_reduce, reduce, reduce_scatter, all_gather, broadcast, barrier
passed on  gather, scatter, all_to_all; bitwise operations, reductions of bool; wrong arguments

torch itself gives lists of tensors and an object with the options. Programs may also give a tensor
that is alone, and an option in the place of the object: `group.allreduce(tensor, ReduceOp.MAX)`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work

from unisono.communicators import Communicator
from unisono.groups import collectives

# Its type stubs tell calls apart, by overloads, that are one here.
_ProcessGroup: Any = distributed.ProcessGroup

Movement: TypeAlias = Callable[[Communicator], None]
Options = TypeVar("Options")


def _passed_on(name: str) -> Callable[..., Work]:
    def pass_on(self: CommunicatorGroup, *args: Any, **options: Any) -> Work:
        return self._pass_on(name, *args, **options)

    pass_on.__doc__ = f"Passes `{name}` on."
    return pass_on


class CommunicatorGroup(_ProcessGroup):  # type: ignore[misc]
    """Turns the calls of torch into calls of a communicator, which a subclass makes."""

    @abstractmethod
    def _begin(self, call: Movement, outputs: list[Tensor], name: str, opts: Any) -> Work:
        """Makes a call of the communicator."""

    @abstractmethod
    def _pass_on(self, name: str, *args: Any, **options: Any) -> Work:
        """Does what the communicator cannot do, or refuses it."""

    @abstractmethod
    def _carries(self, device: torch.device) -> bool:
        """Whether the tensors of a device are given to the communicator."""

    def _carries_all(self, tensors: Sequence[Tensor]) -> bool:
        return all(self._carries(tensor.device) for tensor in tensors)

    # Names and signatures are those that torch calls; `collectives` says what they do.

    def allreduce(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, *, op: Any = None
    ) -> Work:
        tensors = _listed(tensors)
        return self._reduction(
            partial(collectives.all_reduce, tensors=tensors),
            tensors if _alike(tensors) else None,
            "allreduce",
            tensors,
            _options(c10d.AllreduceOptions, opts, reduceOp=op),
            or_sparse=len(tensors) == 1,
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._reduction(
            partial(collectives.all_reduce_coalesced, tensors=tensors),
            tensors if _of_one_kind(tensors) else None,
            "allreduce_coalesced",
            tensors,
            opts or c10d.AllreduceCoalescedOptions(),
        )

    def reduce(
        self,
        tensors: list[Tensor] | Tensor,
        opts: Any = None,
        op: Any = None,
        *,
        root: int | None = None,
    ) -> Work:
        tensors = _listed(tensors)
        opts = _options(c10d.ReduceOptions, opts, rootRank=root, reduceOp=op)
        return self._reduction(
            lambda communicator, op: collectives.reduce(
                communicator, op, tensors[0], opts.rootRank
            ),
            tensors if len(tensors) == 1 and self._has_root(opts, tensors) else None,
            "reduce",
            tensors,
            opts,
        )

    def broadcast(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, *, root: int | None = None
    ) -> Work:
        tensors = _listed(tensors)
        opts = _options(c10d.BroadcastOptions, opts, rootRank=root)
        return self._movement(
            partial(
                collectives.broadcast, tensors=tensors, root=opts.rootRank, position=opts.rootTensor
            ),
            tensors if _alike(tensors) and self._has_root(opts, tensors) else None,
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
        lists, inputs = _listed_twice(output_tensors), _listed(input_tensors)
        is_ours = _listed_by_rank(lists, inputs, self.size())
        return self._movement(
            lambda communicator: collectives.all_gather(communicator, lists[0], inputs[0]),
            lists[0] if is_ours and _alike([*inputs, *lists[0]]) else None,
            "allgather",
            lists,
            inputs,
            opts or c10d.AllgatherOptions(),
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Puts the tensors of all ranks end to end. Before torch 2.13, it has another name."""
        return self._gather_parts("_allgather_base", output, input, opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        return self._gather_parts("allgather_into_tensor_coalesced", outputs, inputs, opts)

    def _gather_parts(self, name: str, output: Any, input: Any, opts: Any) -> Work:
        outputs, inputs = _listed(output), _listed(input)
        return self._movement(
            partial(collectives.all_gather_single, outputs=outputs, inputs=inputs),
            outputs if _in_parts(outputs, inputs, self.size()) else None,
            name,
            output,
            input,
            opts or c10d.AllgatherOptions(),
        )

    def reduce_scatter(
        self,
        output_tensors: list[Tensor] | Tensor,
        input_tensors: list[list[Tensor]] | list[Tensor],
        opts: Any = None,
        *,
        op: Any = None,
    ) -> Work:
        outputs, lists = _listed(output_tensors), _listed_twice(input_tensors)
        opts = _options(c10d.ReduceScatterOptions, opts, reduceOp=op)
        is_ours = (
            _listed_by_rank(lists, outputs, self.size())
            and _of_one_kind([*outputs, *lists[0]])
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
        """Gives every rank its part of a sum. Before torch 2.13, it has another name."""
        return self._scatter_parts("_reduce_scatter_base", output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        return self._scatter_parts("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _scatter_parts(self, name: str, output: Any, input: Any, opts: Any) -> Work:
        outputs, inputs = _listed(output), _listed(input)
        return self._reduction(
            partial(collectives.reduce_scatter_single, outputs=outputs, inputs=inputs),
            outputs if _in_parts(inputs, outputs, self.size()) else None,
            name,
            output,
            input,
            opts or c10d.ReduceScatterOptions(),
        )

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or c10d.BarrierOptions()
        if opts.device is not None and not self._carries(opts.device):
            return self._pass_on("barrier", opts)
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

    def _has_root(self, opts: Any, tensors: list[Tensor]) -> bool:
        has_root: bool = 0 <= opts.rootRank < self.size() and 0 <= opts.rootTensor < len(tensors)
        return has_root

    def _reduction(
        self,
        call: Callable[..., None],
        outputs: list[Tensor] | None,
        name: str,
        *args: Any,
        or_sparse: bool = False,
    ) -> Work:
        """Does `call`, or what others call `name(*args)` if it cannot be done here."""
        op = None
        if outputs is not None and self._carries_all(outputs):
            op = collectives.reducible_op(args[-1].reduceOp, outputs, or_sparse=or_sparse)
        if op is None or outputs is None:
            return self._pass_on(name, *args)
        return self._begin(partial(call, op=op), outputs, name, args[-1])

    def _movement(
        self, call: Movement, outputs: list[Tensor] | None, name: str, *args: Any
    ) -> Work:
        if outputs is None or not self._carries_all(outputs) or not collectives.are_dense(outputs):
            return self._pass_on(name, *args)
        return self._begin(call, outputs, name, args[-1])


def _listed(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _listed_twice(tensors: list[list[Tensor]] | list[Tensor]) -> list[list[Tensor]]:
    found: Any = tensors
    return [found] if found and isinstance(found[0], Tensor) else found


def _options(kind: type[Options], given: object, **fields: Any) -> Options:
    if isinstance(given, kind):
        return given
    found = kind()
    if given is not None:
        fields[next(iter(fields))] = given
    for name, value in fields.items():
        if value is not None:
            setattr(found, name, value)
    return found


def _of_one_kind(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors, all of one dtype and layout and on one device."""
    return len({(one.dtype, one.layout, one.device) for one in tensors}) == 1


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors of one kind, all of one shape."""
    return _of_one_kind(tensors) and len({one.shape for one in tensors}) == 1


def _listed_by_rank(lists: Sequence[Sequence[Tensor]], others: Sequence[Tensor], size: int) -> bool:
    """Whether there is one list with a tensor for each rank, and one tensor on the other side."""
    return len(lists) == 1 and len(others) == 1 and len(lists[0]) == size


def _in_parts(whole: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> bool:
    """Whether each of `whole` has `size` times the elements of its part, of the same kind."""
    return (
        bool(whole)
        and [one.numel() for one in whole] == [one.numel() * size for one in parts]
        and all(map(_of_one_kind, zip(whole, parts, strict=True)))
    )
