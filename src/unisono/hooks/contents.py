"""What a hook keeps for a replica, apart from the objects that hold it.

So each replica gets its own copy of a hook and its state, and another worker can go on with it.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from unisono.communicators.wire import attributes_of
from unisono.errors import UnsupportedError

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SEQUENCES = (list, tuple, set, frozenset, deque)
# What all replicas share.
_FIXED = (
    enum.Enum,
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.device,
    torch.dtype,
    distributed.ProcessGroup,
    nn.Module,
    nn.Parameter,
    Optimizer,
)


@dataclass
class Fixed:
    """In place of what all replicas share."""


@dataclass
class Fields:
    """The attributes of an object, or the state of a random generator."""

    values: Any


def content_of(thing: Any, where: str = "state") -> Any:
    """Returns copies of all that `thing` keeps, in containers of plain values and tensors.

    Raises:
        UnsupportedError: If it keeps something that cannot be copied so. It is called `where`.
    """
    if isinstance(thing, _FIXED):
        return Fixed()
    if isinstance(thing, types.FunctionType):
        _check_closure(thing)
        return Fixed()
    if isinstance(thing, _PLAIN):
        return thing
    if isinstance(thing, Tensor):
        return thing.detach().clone()
    if isinstance(thing, np.ndarray):
        return thing.copy()
    if type(thing) in _SEQUENCES:
        return type(thing)(content_of(one, f"{where}[{i}]") for i, one in enumerate(thing))
    if isinstance(thing, dict):
        return {key: content_of(one, f"{where}[{key!r}]") for key, one in thing.items()}
    if isinstance(thing, types.MethodType):
        return Fields({"__self__": content_of(thing.__self__, where)})
    if isinstance(thing, (torch.Generator, np.random.RandomState)):
        options: Any = {} if isinstance(thing, torch.Generator) else {"legacy": False}
        return Fields(thing.get_state(**options))
    if not _is_of_python(type(thing)):
        raise UnsupportedError(
            f"The communication hook keeps a {type(thing).__name__} in {where}, which cannot be "
            "copied for each replica. Keep numbers, texts and tensors, in lists, dicts and objects."
        )
    return Fields(
        {name: content_of(one, f"{where}.{name}") for name, one in attributes_of(thing).items()}
    )


# `Py_TPFLAGS_HEAPTYPE`, which some classes of C have, too, and two flags that only those have:
# `Py_TPFLAGS_DISALLOW_INSTANTIATION` and `Py_TPFLAGS_IMMUTABLETYPE`.
_HEAP, _ONLY_IN_C = 1 << 9, 1 << 7 | 1 << 8


def _is_of_python(kind: type) -> bool:
    """Whether a class and all its bases are written in Python, so that attributes are all it has.

    Otherwise a base in C may keep something else, and has its own `__new__` to make room for it.
    """
    return all(
        base.__flags__ & _HEAP
        and not base.__flags__ & _ONLY_IN_C
        and not isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
        for base in kind.__mro__[:-1]
    )


def restored(
    thing: Any, content: Any, place: torch.device | None = None, *, in_place: bool = False
) -> Any:
    """Returns an object like `thing` that keeps a copy of `content`.

    Args:
        thing: What `content_of` was called with, here or on another worker.
        content: What it returned.
        place: The device of tensors; None if they stay where they are.
        in_place: Whether `thing` itself gets the content, where it is an object or a dict.
    """
    if isinstance(content, Fixed):
        return thing
    if isinstance(content, Tensor):
        return content.to(place or content.device, copy=True)
    if isinstance(content, np.ndarray):
        return content.copy()
    if type(content) in _SEQUENCES:
        likes = list(thing) if type(thing) is type(content) else []
        likes += [None] * (len(content) - len(likes))
        parts = zip(likes, content, strict=False)
        return type(content)(restored(like, one, place, in_place=in_place) for like, one in parts)
    if isinstance(content, dict):
        like = thing if isinstance(thing, dict) else {}
        made = {key: restored(like.get(key), one, place) for key, one in content.items()}
        if not isinstance(thing, dict):
            return made
        # Of the same kind, such as a `defaultdict`.
        filled = thing if in_place else thing.copy()
        filled.clear()
        filled.update(made)
        return filled
    if not isinstance(content, Fields):
        return content
    if isinstance(thing, types.MethodType):
        own = restored(thing.__self__, content.values["__self__"], place, in_place=in_place)
        return types.MethodType(thing.__func__, own)
    if isinstance(thing, (torch.Generator, np.random.RandomState)):
        return _drawing_on(thing, content.values)
    target = thing if in_place else object.__new__(type(thing))
    like = attributes_of(thing)
    for name, one in content.values.items():
        object.__setattr__(target, name, restored(like.get(name), one, place, in_place=in_place))
    return target


def _drawing_on(like: Any, state: Any) -> Any:
    is_torch = isinstance(like, torch.Generator)
    made: Any = torch.Generator(like.device) if is_torch else np.random.RandomState()
    made.set_state(state.cpu() if is_torch else state)
    return made


def _check_closure(function: types.FunctionType) -> None:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found = cell.cell_contents
        except ValueError:
            # It is not set yet.
            continue
        if isinstance(found, (Tensor, list, dict, set, deque)):
            raise UnsupportedError(
                f"The communication hook {function.__name__!r} keeps {name!r} of the function that "
                "made it, which all replicas of a worker would share. Keep it in `state`."
            )
