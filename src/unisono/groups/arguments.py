"""The arguments of the methods of a process group: their shorter forms, and checks of them.

torch itself gives lists of tensors and an object with the options. Programs may also give a tensor
that is alone, and an option in the place of the object: `group.allreduce(tensor, ReduceOp.MAX)`.

A call that fails a check goes to Gloo, which raises its own error or knows what to do with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

Options = TypeVar("Options")


def listed(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    """Returns a list also of a tensor that is alone."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def listed_twice(tensors: list[list[Tensor]] | list[Tensor]) -> list[list[Tensor]]:
    """Returns a list of lists also of a list that is alone."""
    found: Any = tensors
    return [found] if found and isinstance(found[0], Tensor) else found


def options(kind: type[Options], given: object, **fields: Any) -> Options:
    """Returns the options of a collective."""
    if isinstance(given, kind):
        return given
    found = kind()
    if given is not None:
        fields[next(iter(fields))] = given
    for name, value in fields.items():
        if value is not None:
            setattr(found, name, value)
    return found


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
