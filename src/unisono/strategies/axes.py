"""The dimensions that a reduction goes over, besides the replicas."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.arguments import check_int, in_words
from unisono.contexts import check_axis
from unisono.errors import UnsupportedError


def read_axes(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns dimensions as a tuple; None stays None."""
    if axis is None:
        return None
    try:
        given = axis if isinstance(axis, (list, tuple)) else (axis,)
        return tuple(check_int("axis", one) for one in given)
    except UnsupportedError:
        raise UnsupportedError(
            f"`axis` must be an int, a sequence of ints or None, got {in_words(axis)}."
        ) from None


def check_axes(tensor: Tensor, axes: tuple[int, ...]) -> None:
    """Raises unless `tensor` can be added up over the dimensions `axes`."""
    if tensor.is_quantized:
        raise UnsupportedError(f"A tensor of {tensor.dtype} has no sum. Call `.dequantize()`.")
    if len({check_axis(tensor, axis) for axis in axes}) < len(axes):
        raise UnsupportedError(f"`axis` must name each dimension once, got {axes}.")
