"""Whether the values of the replicas can be combined, and in words why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.options import ReduceOp

_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
_REAL = frozenset(
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    ]
)
_LAYOUTS = (torch.strided, torch.sparse_coo)


def check_replicas(
    op: ReduceOp, tensors: Sequence[Tensor], what: str = "The value", first_id: int = 0
) -> None:
    """Raises unless `tensors`, one per replica, can be combined with `op`.

    Shapes and dtypes must be the same on every replica: nothing is broadcast or promoted. The
    error numbers the replicas from `first_id` on.
    """
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype:
            raise _mismatch(what, "dtype", tensors, lambda t: t.dtype, first_id)
        if tensor.shape != first.shape:
            raise _mismatch(what, "shape", tensors, lambda t: tuple(t.shape), first_id)
        if tensor.layout not in _LAYOUTS:
            raise UnsupportedError(
                f"{what} has the layout {tensor.layout}; dense and sparse COO tensors can be "
                "reduced. Call `.to_dense()` or `.to_sparse()` first."
            )
    _check_dtype(op, first.dtype, what)


def _check_dtype(op: ReduceOp, dtype: torch.dtype, what: str) -> None:
    if dtype.is_complex:
        if op in _ORDERED:
            raise UnsupportedError(f"{what} is {dtype}, and complex numbers have no {op}.")
    elif dtype == torch.bool:
        raise UnsupportedError(
            f"{what} is torch.bool, which has no {op}. Convert it, for example to torch.int32."
        )
    elif dtype not in _REAL:
        raise UnsupportedError(
            f"{what} is {dtype}, which torch cannot add. Convert it, for example to torch.float32."
        )


def _mismatch(
    what: str,
    trait: str,
    tensors: Sequence[Tensor],
    read: Callable[[Tensor], Hashable],
    first_id: int,
) -> ReplicaMismatchError:
    traits = [read(tensor) for tensor in tensors]
    usual, _ = Counter(traits).most_common(1)[0]
    odd = ", ".join(f"replica {i} has {t}" for i, t in enumerate(traits, first_id) if t != usual)
    return ReplicaMismatchError(
        f"{what} must have one {trait} on all {len(tensors)} replicas: {odd}, the others have "
        f"{usual}. Nothing was reduced."
    )
