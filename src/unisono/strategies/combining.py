"""Combines the values of all replicas, for `Strategy.reduce` and `Strategy.gather`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.arguments import check_int, in_words
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.kernels import check_axes, check_gather
from unisono.options import ReduceOp
from unisono.values import DistributedValues, PerReplica, as_tensor, components_of

if TYPE_CHECKING:
    from unisono.strategies.extended import StrategyExtended


def read_axes(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns dimensions as a tuple; None stays None."""
    if axis is None:
        return None
    try:
        given = axis if isinstance(axis, (list, tuple)) else (axis,)
        return tuple(check_int("axis", one) for one in given)
    except UnsupportedError:
        raise UnsupportedError(
            f"`axis` must be an int, a sequence of ints or None, got {in_words(axis)}. To reduce "
            "to devices, write `strategy.extended.reduce_to(reduce_op, value, destinations)`."
        ) from None


def reduce_leaf(
    extended: StrategyExtended, op: ReduceOp, value: Any, axes: tuple[int, ...] | None
) -> Any:
    """Reduces one value over the replicas and the dimensions `axes`, to the first device."""
    host = extended.worker_devices[0]
    if value is None:
        return None
    if axes is None:
        return extended.reduce_to(op, value, host)
    num_local = len(extended.worker_devices)
    parts = value.values if isinstance(value, DistributedValues) else (value,) * num_local
    tensors = [as_tensor(part) for part in parts]
    for tensor in tensors:
        check_axes(tensor, axes)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise UnsupportedError(
            f"With an `axis`, the operation must be SUM or MEAN, got {op}. Reduce without an "
            "`axis` first."
        )

    def sum_of(tensors: Iterable[Tensor]) -> Any:
        summed = PerReplica.placed(tuple(tensors), extended.worker_devices)
        return extended.reduce_to(ReduceOp.SUM, summed, host)

    are_counted = extended.counting.are_counted(value)
    sums = [tensor.sum(dim=axes) for tensor in tensors]
    total = sum_of(
        own if is_counted else torch.zeros_like(own)
        for own, is_counted in zip(sums, are_counted, strict=True)
    )
    if op is ReduceOp.SUM:
        return total
    num_elements = sum_of(
        torch.tensor(tensor.numel() // max(1, own.numel()) * is_counted)
        for tensor, own, is_counted in zip(tensors, sums, are_counted, strict=True)
    ).to(total.device)
    is_real = total.is_floating_point() or total.is_complex()
    return (total if is_real else total.double()) / num_elements


def concatenate(extended: StrategyExtended, value: Any, axis: int) -> Any:
    """Concatenates the components of one value; see `Strategy.gather`."""
    workers = extended.workers
    is_distributed = isinstance(value, DistributedValues)
    components = components_of(value)
    num_local = len(extended.worker_devices)
    if not components or (is_distributed and len(components) != num_local):
        raise ReplicaMismatchError(
            f"Cannot gather a value of {len(components)} components: the strategy has "
            f"{num_local} replicas on this worker. Gather a value that its `run` returned."
        )
    tensors = [as_tensor(component).detach() for component in components]
    for tensor in tensors:
        check_gather([tensor], axis)
    if not is_distributed and not workers.are_many:
        return value
    if is_distributed or num_local == 1:
        are_counted = extended.counting.are_counted(value)
        tensors = [
            tensor if is_counted else tensor.narrow(axis, 0, 0)
            for tensor, is_counted in zip(tensors, are_counted, strict=True)
        ]
    return workers.concatenate(tensors, axis)[0]
