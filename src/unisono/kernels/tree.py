"""The order of every sum, and the sum in that order through torch.

Replicas are combined level by level: neighbors (0, 1), (2, 3), ... become one, and an odd last
one moves up as it is.

    7 replicas   ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

The order depends on the replica ids alone, so every path of the library, packed or not, native or
not, gives the same bits. float16 and bfloat16 are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.options import ReduceOp

_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.PROD: lambda a, b: _multiply(a, b),
    # Not `torch.minimum`, which for 0.0 and -0.0 keeps now the first, now the second.
    ReduceOp.MIN: lambda a, b: torch.where((b < a) | (b != b), b, a),
    ReduceOp.MAX: lambda a, b: torch.where((b > a) | (b != b), b, a),
}
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
# torch can neither add nor compare these dtypes, so signed views of the same size are used.
_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_MEAN_DTYPE = {
    torch.int8: torch.float32,
    torch.int16: torch.float32,
    torch.uint8: torch.float32,
    torch.uint16: torch.float32,
    torch.int32: torch.float64,
    torch.int64: torch.float64,
    torch.uint32: torch.float64,
    torch.uint64: torch.float64,
}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that partial results of `dtype` are kept in."""
    return _WIDE.get(dtype, dtype)


def result_dtype(op: ReduceOp, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a reduction: a mean of integers is a float, as in TensorFlow."""
    return _MEAN_DTYPE.get(dtype, dtype) if op is ReduceOp.MEAN else dtype


def undivided(op: ReduceOp) -> ReduceOp:
    """Returns how parts of a result are combined: a mean is divided at the end."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def tree_reduce(op: ReduceOp, tensors: Sequence[Tensor]) -> Tensor:
    """Combines the tensors of the replicas in tree order; the result is always a new tensor."""
    dtype = tensors[0].dtype
    total = _combine(op, [tensor.detach() for tensor in tensors])
    return divide(total, len(tensors), dtype) if op is ReduceOp.MEAN else total.to(dtype)


def divide(total: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Divides a sum of `count` values of `dtype`: a true division, rounded once."""
    result = result_dtype(ReduceOp.MEAN, dtype)
    if total.is_complex():
        # torch divides a complex number by a complex one; part by part is exact and the same
        # everywhere.
        return torch.view_as_complex(_quotient(torch.view_as_real(total), count)).to(result)
    return _quotient(total.to(wide_dtype(result)), count).to(result)


def _quotient(total: Tensor, count: int) -> Tensor:
    if not total.is_cuda:
        return total / count
    # On a GPU torch multiplies by the reciprocal of a number, which rounds twice.
    return total / torch.full((), count, dtype=total.dtype, device=total.device)


def _combine(op: ReduceOp, tensors: list[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    if dtype.is_complex and op in (ReduceOp.SUM, ReduceOp.MEAN):
        parts = [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]
        return torch.view_as_complex(_combine(op, parts))
    if dtype in _SIGNED:
        return _combine_unsigned(op, tensors)
    level = [tensor.to(wide_dtype(dtype)) for tensor in tensors]
    combine = _COMBINE[op]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [combine(a, b) for a, b in pairs] + level[len(level) & ~1 :]
    total = level[0]
    return total.clone() if len(tensors) == 1 and dtype == total.dtype else total


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_complex():
        return a * b
    # torch rounds complex products differently at the end of a tensor than in its middle.
    real = a.real * b.real - a.imag * b.imag
    return torch.complex(real, a.real * b.imag + a.imag * b.real)


def _combine_unsigned(op: ReduceOp, tensors: list[Tensor]) -> Tensor:
    unsigned = tensors[0].dtype
    signed = _SIGNED[unsigned]
    # Sums and products wrap alike; for comparisons the order is shifted to start at the minimum.
    shift = torch.iinfo(signed).min if op in (ReduceOp.MIN, ReduceOp.MAX) else 0
    views = [tensor.contiguous().view(signed) + shift for tensor in tensors]
    return (_combine(op, views) - shift).view(unsigned)
