"""How much each replica's value counts when values are combined.

A mean weights each replica by its number of samples, so the mean of means is the mean over all
samples. A replica without samples counts nothing: it contributes the neutral element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.kernels import result_dtype
from unisono.options import ReduceOp
from unisono.values.tensor_like import as_tensor


def factors_of(op: ReduceOp, counts: Sequence[int]) -> tuple[float, ...]:
    """Returns the factor of each replica's value; 0 means the neutral element.

    The counts differ, so a replica has samples.

    >>> factors_of(ReduceOp.MEAN, (2, 1, 1)), factors_of(ReduceOp.SUM, (2, 1, 0))
    ((1.5, 0.75, 0.75), (1.0, 1.0, 0.0))
    """
    total = sum(counts)
    if op is ReduceOp.MEAN:
        return tuple(count * len(counts) / total for count in counts)
    return tuple(1.0 if count else 0.0 for count in counts)


def weighed(op: ReduceOp, components: Sequence[Any], factors: Sequence[float]) -> tuple[Any, ...]:
    """Returns the components multiplied by their factors."""
    tensors = [as_tensor(component) for component in components]
    if op is ReduceOp.MEAN:
        tensors = [tensor.to(result_dtype(op, tensor.dtype)) for tensor in tensors]
    return tuple(
        tensor if factor == 1.0 else weighed_tensor(op, tensor, factor)
        for tensor, factor in zip(tensors, factors, strict=True)
    )


def weighed_tensor(op: ReduceOp, tensor: Tensor, factor: float) -> Tensor:
    """Returns `tensor` times `factor`; for a factor of 0, the neutral element."""
    if factor:
        return tensor * factor
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return torch.zeros_like(tensor)
    if op is ReduceOp.PROD:
        return torch.ones_like(tensor)
    least, most = -torch.inf, torch.inf
    if not tensor.dtype.is_floating_point:
        info = torch.iinfo(tensor.dtype)
        least, most = info.min, info.max
    return torch.full_like(tensor, most if op is ReduceOp.MIN else least)
