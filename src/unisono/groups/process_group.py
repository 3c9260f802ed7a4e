"""A process group of torch.distributed whose collectives a communicator does.

done here  all_reduce, reduce, reduce_scatter, all_gather, broadcast, barrier
passed on  gather, scatter, all_to_all; bitwise operations, reductions of bool; wrong arguments
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
    Work,
)

from unisono.communicators import Communicator
from unisono.groups import arguments, collectives
from unisono.groups.arguments import listed, listed_twice, options
from unisono.options import ReduceOp

# Its type stubs tell calls apart, by overloads, that are one here.
_ProcessGroup: Any = distributed.ProcessGroup

Movement: TypeAlias = Callable[[Communicator], None]
Reduction: TypeAlias = Callable[[Communicator, ReduceOp], None]


def _passed_on(name: str) -> Callable[..., Work]:
    """A method that is never done here."""

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

    # Names and signatures are those that torch calls.

    def allreduce(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, *, op: Any = None
    ) -> Work:
        """Overwrites each tensor with the combination of all tensors of all ranks."""
        tensors = listed(tensors)
        opts = options(AllreduceOptions, opts, reduceOp=op)
        return self._reduction(
            lambda communicator, op: collectives.all_reduce(communicator, op, tensors),
            tensors if arguments.alike(tensors) else None,
            "allreduce",
            tensors,
            opts,
            or_sparse=len(tensors) == 1,
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Overwrites each tensor with the combination of those at its place on all ranks."""
        return self._reduction(
            lambda communicator, op: collectives.all_reduce_coalesced(communicator, op, tensors),
            tensors if arguments.of_one_kind(tensors) else None,
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
            tensors if arguments.alike(tensors) and self._has_root(opts, tensors) else None,
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
        is_ours = arguments.listed_by_rank(lists, inputs, self.size())
        return self._movement(
            lambda communicator: collectives.all_gather(communicator, lists[0], inputs[0]),
            lists[0] if is_ours and arguments.alike([*inputs, *lists[0]]) else None,
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
            outputs if arguments.in_parts(outputs, inputs, self.size()) else None,
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
            arguments.listed_by_rank(lists, outputs, self.size())
            and arguments.of_one_kind([*outputs, *lists[0]])
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
            outputs if arguments.in_parts(inputs, outputs, self.size()) else None,
            name,
            *given,
            opts or ReduceScatterOptions(),
        )

    def barrier(self, opts: Any = None) -> Work:
        """Waits for all ranks."""
        opts = opts or BarrierOptions()
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
        call: Reduction,
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
        return self._begin(lambda communicator: call(communicator, op), outputs, name, args[-1])

    def _movement(
        self, call: Movement, outputs: list[Tensor] | None, name: str, *args: Any
    ) -> Work:
        if outputs is None or not self._carries_all(outputs) or not collectives.are_dense(outputs):
            return self._pass_on(name, *args)
        return self._begin(call, outputs, name, args[-1])
