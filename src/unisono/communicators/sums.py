"""The terms of all ranks, combined in the order of the whole library."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.kernels import divide, reduce_into, tree_reduce, wide_dtype
from unisono.options import ReduceOp


def combine_into(
    op: ReduceOp, terms: Sequence[Tensor], outputs: Sequence[Tensor], count: int | None
) -> None:
    """Writes the combination of `terms` into every output, which may be one of the terms."""
    if op is ReduceOp.MEAN and count not in (None, len(terms)):
        _mean_into(terms, outputs, count or 1)
    elif not reduce_into(op, [terms], [outputs]):
        _copy(tree_reduce(op, terms), outputs)


def _mean_into(terms: Sequence[Tensor], outputs: Sequence[Tensor], count: int) -> None:
    dtype = terms[0].dtype
    wide = wide_dtype(dtype)
    if wide == dtype and reduce_into(ReduceOp.SUM, [terms], [outputs[:1]]):
        total = outputs[0]
    else:
        # The sum of half precision is divided before it is rounded, not after.
        total = tree_reduce(ReduceOp.SUM, [term.to(wide) for term in terms])
    _copy(divide(total, count, dtype), outputs)


def _copy(result: Tensor, outputs: Sequence[Tensor]) -> None:
    for output in outputs:
        output.copy_(result)
