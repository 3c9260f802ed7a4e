"""The dimensions that a reduction goes over, besides the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.arguments import check_int, in_words
from unisono.errors import UnsupportedError
from unisono.kernels import check_axes
from unisono.options import ReduceOp
from unisono.strategies.extended import StrategyExtended
from unisono.values import DistributedValues, PerReplica, as_tensor


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
    if value is None:
        return None
    if axes is None:
        return extended.reduce_to(op, value, extended.host)
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
    are_counted = extended.counting.are_counted(value)
    sums = [tensor.sum(dim=axes) for tensor in tensors]
    total = _sum(
        extended,
        [
            own if is_counted else torch.zeros_like(own)
            for own, is_counted in zip(sums, are_counted, strict=True)
        ],
    )
    if op is ReduceOp.SUM:
        return total
    sizes = [
        torch.tensor(tensor.numel() // max(1, own.numel()) * is_counted)
        for tensor, own, is_counted in zip(tensors, sums, are_counted, strict=True)
    ]
    num_elements = _sum(extended, sizes).to(total.device)
    is_real = total.is_floating_point() or total.is_complex()
    return (total if is_real else total.double()) / num_elements


def _sum(extended: StrategyExtended, tensors: Sequence[Tensor]) -> Any:
    value = PerReplica.placed(tuple(tensors), extended.worker_devices)
    return extended.reduce_to(ReduceOp.SUM, value, extended.host)
