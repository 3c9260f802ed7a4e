"""Checks of arguments, before anything is sent.

A call that fails a check goes to Gloo, which raises its own error or knows what to do with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors, all of one shape and dtype."""
    return len(tensors) == 1 or (
        len(tensors) > 1
        and all(
            one.shape == tensors[0].shape and one.dtype == tensors[0].dtype for one in tensors[1:]
        )
    )


def of_one_dtype(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors, all of one dtype."""
    return bool(tensors) and all(one.dtype == tensors[0].dtype for one in tensors[1:])


def listed_by_rank(lists: Sequence[Sequence[Tensor]], others: Sequence[Tensor], size: int) -> bool:
    """Whether there is one list with a tensor for each rank, and one tensor on the other side."""
    return len(lists) == 1 and len(others) == 1 and len(lists[0]) == size


def in_parts(whole: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> bool:
    """Whether each of `whole` has `size` times as many elements as its part, of one dtype."""
    return (
        bool(whole)
        and len(whole) == len(parts)
        and all(
            one.numel() == part.numel() * size and one.dtype == part.dtype
            for one, part in zip(whole, parts, strict=True)
        )
    )
