"""Raises an error that says why the values of the replicas cannot be combined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.options import ReduceOp

_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
REAL_DTYPES = frozenset(
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
        check_layout(tensor, what)
        if tensor.dtype != first.dtype:
            raise _mismatch(what, "dtype", tensors, lambda t: t.dtype, first_id)
        if tensor.shape != first.shape:
            raise _mismatch(what, "shape", tensors, lambda t: tuple(t.shape), first_id)
    _check_dtype(op, first.dtype, what)


def check_layout(
    tensor: Tensor,
    what: str = "The value",
    action: str = "reduced",
    layouts: Sequence[torch.layout] = _LAYOUTS,
) -> None:
    """Raises unless `tensor` has one of the given layouts, and holds numbers."""
    if tensor.is_nested:
        raise UnsupportedError(
            f"{what} is a nested tensor, which cannot be {action}. Call `.to_padded_tensor(0.0)` "
            "first."
        )
    if tensor.is_meta:
        raise UnsupportedError(
            f"{what} is on the device 'meta', so it has no values. Move it to a real device first."
        )
    if tensor.layout not in layouts:
        raise UnsupportedError(
            f"{what} has the layout {tensor.layout} and cannot be {action}. Call `.to_dense()` "
            "first."
        )


def check_axes(tensor: Tensor, axes: Sequence[int]) -> None:
    """Raises unless `tensor` can be reduced along the dimensions `axes`, each given once."""
    check_layout(tensor)
    if tensor.is_quantized:
        raise UnsupportedError(
            f"A quantized tensor ({tensor.dtype}) cannot be summed. Call `.dequantize()` first."
        )
    if tensor.dtype != torch.bool:
        # torch counts bools.
        _check_dtype(ReduceOp.SUM, tensor.dtype, "The value")
    for axis in axes:
        _check_axis(axis, tensor.dim())
    if len({axis % tensor.dim() for axis in axes}) < len(axes):
        raise UnsupportedError(f"`axis` must name each dimension once, got {tuple(axes)}.")


def _check_axis(axis: int, num_dims: int) -> None:
    if not -num_dims <= axis < num_dims:
        if not num_dims:
            raise UnsupportedError(
                f"`axis` is {axis}, but a scalar has no dimensions. Use `axis=None`."
            )
        raise UnsupportedError(
            f"`axis` must be from {-num_dims} to {num_dims - 1}, the dimensions of the value, got "
            f"{axis}."
        )


def check_gather(
    tensors: Sequence[Tensor], axis: int, first_id: int = 0, holder: str = "replica"
) -> None:
    """Raises unless `tensors`, one per `holder`, can be concatenated along `axis`."""
    what, action = "The value", "gathered"
    for tensor in tensors:
        check_layout(tensor, what, action, (torch.strided,))
    first = tensors[0]

    def check(trait: str, read: Callable[[Tensor], Hashable]) -> None:
        if any(read(tensor) != read(first) for tensor in tensors):
            raise _mismatch(what, trait, tensors, read, first_id, action, holder)

    check("dtype", lambda tensor: tensor.dtype)
    check("number of dimensions", lambda tensor: tensor.dim())
    if first.dim() == 0:
        raise UnsupportedError("A scalar has no axis to gather along. Call `.reshape(1)` first.")
    _check_axis(axis, first.dim())
    others = [i for i in range(first.dim()) if i != axis % first.dim()]
    check(f"shape but for dimension {axis}", lambda t: tuple(t.shape[i] for i in others))


def _check_dtype(op: ReduceOp, dtype: torch.dtype, what: str) -> None:
    if dtype.is_complex:
        if op in _ORDERED:
            raise UnsupportedError(
                f"{what} is {dtype}, and complex numbers have no {op}. Use SUM or MEAN."
            )
    elif dtype == torch.bool:
        raise UnsupportedError(
            f"{what} is torch.bool, which has no {op}. Convert it, for example to torch.int32."
        )
    elif dtype not in REAL_DTYPES:
        raise UnsupportedError(
            f"{what} is {dtype}, which torch cannot add. Convert it, for example to torch.float32."
        )


def _mismatch(
    what: str,
    trait: str,
    tensors: Sequence[Tensor],
    read: Callable[[Tensor], Hashable],
    first_id: int,
    action: str = "reduced",
    holder: str = "replica",
) -> ReplicaMismatchError:
    traits = [read(tensor) for tensor in tensors]
    usual, _ = Counter(traits).most_common(1)[0]
    odd = ", ".join(f"{holder} {i} has {t}" for i, t in enumerate(traits, first_id) if t != usual)
    return ReplicaMismatchError(
        f"{what} must have the same {trait} on all {len(tensors)} {holder}s, but {odd}, and the "
        f"others have {usual}. Nothing was {action}: give all {holder}s the same {trait}."
    )
