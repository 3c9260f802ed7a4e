"""The dimensions that a reduction goes over, besides the replicas."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.arguments import check_int, in_words
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
            f"`axis` must be an int, a sequence of ints or None, got {in_words(axis)}. To reduce "
            "to devices, write `strategy.extended.reduce_to(reduce_op, value, destinations)`."
        ) from None
