"""`ReductionToOneDevice`: everything is sent to one device, and the result from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from unisono.devices import Device, DeviceLike, resolve
from unisono.errors import UnsupportedError
from unisono.kernels import divide
from unisono.options import CommunicationOptions, ReduceOp
from unisono.reductions.scheduled import Ends, ScheduledOps

AccumulationFn: TypeAlias = Callable[[list[Tensor]], Tensor]


class ReductionToOneDevice(ScheduledOps):
    """Copies values to one device to reduce them there, then copies the result to the destinations.

    Replicas that share a memory, such as the CPU devices of a host, copy nothing: all values of a
    batch are reduced where they are, in one pass.

    Args:
        reduce_to_device: The device to reduce on. None means the first destination.
        accumulation_fn: Combines a list of tensors, in replica order and all on the device to
            reduce on, into one tensor. It must not change them. None adds them (or takes the
            minimum, maximum or product). A mean divides its result by the number of replicas. It is
            not used for sparse tensors, which are concatenated.
    """

    def __init__(
        self,
        reduce_to_device: DeviceLike | None = None,
        accumulation_fn: AccumulationFn | None = None,
    ) -> None:
        super().__init__()
        self._reduce_to = None if reduce_to_device is None else resolve(reduce_to_device)
        self._accumulate = accumulation_fn

    @property
    def is_tree_sum(self) -> bool:
        return self._accumulate is None and super().is_tree_sum

    def root(self, ends: Ends) -> Device:
        return self._reduce_to or ends.destinations[0]

    def reduce_plain(
        self, op: ReduceOp, batch: Sequence[tuple[Any, ...]], ends: Ends
    ) -> list[tuple[Tensor, ...] | None]:
        if self._accumulate is not None:
            return [None] * len(batch)
        return super().reduce_plain(op, batch, ends)

    def reduce_in_place(
        self, reduce_op: ReduceOp, batch: Sequence[Sequence[Tensor]], devices: tuple[Device, ...]
    ) -> bool:
        if self._accumulate is not None:
            return False
        return super().reduce_in_place(reduce_op, batch, devices)

    def reduce_dense(
        self,
        op: ReduceOp,
        batch: Sequence[tuple[Tensor, ...]],
        ends: Ends,
        options: CommunicationOptions,
    ) -> list[tuple[Tensor, ...]]:
        is_alone = len(ends.sources) == 1 and ends.sources == ends.destinations
        if self._accumulate is None or is_alone:
            return super().reduce_dense(op, batch, ends, options)
        return [self._reduce_with(self._accumulate, op, tensors, ends) for tensors in batch]

    def _reduce_with(
        self, accumulate: AccumulationFn, op: ReduceOp, tensors: Sequence[Tensor], ends: Ends
    ) -> tuple[Tensor, ...]:
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise UnsupportedError(
                f"With an `accumulation_fn` the operation is {ReduceOp.SUM} (what it returns) or "
                f"{ReduceOp.MEAN} (divided by the number of replicas), got {op}."
            )
        route = self.route(ends)
        total = accumulate([tensor.detach().to(route.root) for tensor in tensors])
        if op is ReduceOp.MEAN:
            total = divide(total, len(tensors), total.dtype)
        return tuple(total.detach().to(output, copy=True) for output in route.outputs)
