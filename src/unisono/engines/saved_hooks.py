"""The hooks for saved tensors that a thread is under: `saved_tensors_hooks`, `save_on_cpu`.

torch tells them from 2.7 on. With torch 2.6 the class that sets them is made to note them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

Hooks: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class _Noted(threading.local):
    """What the current thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


_noted = _Noted()


def current_hooks() -> Hooks | None:
    """Returns the innermost hooks of the current thread."""
    if _ask is not None:
        found: Hooks | None = _ask(False)  # noqa: FBT003
        return found
    return _noted.hooks[-1] if _noted.hooks else None


def _note_hooks() -> None:
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    @functools.wraps(enter)
    def noting_enter(self: Any) -> None:
        enter(self)
        _noted.hooks.append((self.pack_hook, self.unpack_hook))

    @functools.wraps(leave)
    def noting_leave(self: Any, *error: object) -> None:
        _noted.hooks.pop()
        leave(self, *error)

    saved_tensors_hooks.__enter__ = noting_enter  # type: ignore[method-assign]
    saved_tensors_hooks.__exit__ = noting_leave  # type: ignore[method-assign]


if _ask is None:
    _note_hooks()
