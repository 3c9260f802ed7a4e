"""Checks of arguments, before anything is sent.

A call that fails a check goes to Gloo, which raises its own error or knows what to do with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def of_one_kind(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors, all of one dtype and layout and on one device."""
    return bool(tensors) and all(_are_of_one_kind(one, tensors[0]) for one in tensors[1:])


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors of one kind, all of one shape."""
    return of_one_kind(tensors) and all(one.shape == tensors[0].shape for one in tensors[1:])


def listed_by_rank(lists: Sequence[Sequence[Tensor]], others: Sequence[Tensor], size: int) -> bool:
    """Whether there is one list with a tensor for each rank, and one tensor on the other side."""
    return len(lists) == 1 and len(others) == 1 and len(lists[0]) == size


def in_parts(whole: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> bool:
    """Whether each of `whole` has `size` times the elements of its part, of the same kind."""
    if not whole or len(whole) != len(parts):
        return False
    for one, part in zip(whole, parts, strict=True):
        if one.numel() != part.numel() * size or not _are_of_one_kind(one, part):
            return False
    return True


def _are_of_one_kind(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.layout == other.layout and one.device == other.device
