"""The shorter ways in which torch lets one call the methods of a process group.

torch itself gives lists of tensors and an object with the options. Programs may also give a tensor
that is alone, and an option in the place of the object: `group.allreduce(tensor, ReduceOp.MAX)`.
"""

from __future__ import annotations

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
