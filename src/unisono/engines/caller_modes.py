"""Modes and hooks that the caller of `run` is under, and that see what all replicas do.

torch keeps them for each thread. `FlopCounterMode` is a mode for operators, `saved_tensors_hooks`
and `save_on_cpu` are hooks. What a mode counts, threads must not count at the same time, so a mode
for operators sees one operator at a time.

torch tells the hooks from 2.7 on. With torch 2.6 the class that sets them is made to note them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from unisono.torch_private import TorchDispatchMode, num_dispatch_modes, num_function_modes

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


# An operator that waits for another replica, as one of the user's own may, must not stop that one.
_PATIENCE_S = 1.0


def default_device() -> torch.device | None:
    """Returns the innermost device that is set for new tensors; None if none is."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


@dataclass(frozen=True)
class CallerModes:
    """What the caller's thread has entered; see `of_this_thread`."""

    thread: int
    functions: tuple[TorchFunctionMode, ...]
    operators: tuple[TorchDispatchMode, ...]
    hooks: Hooks | None

    @classmethod
    def of_this_thread(cls) -> CallerModes | None:
        """Notes what this thread is under; None if that is nothing, which is quickly seen."""
        functions: tuple[TorchFunctionMode, ...] = ()
        operators: tuple[TorchDispatchMode, ...] = ()
        if num_function_modes() > 0:
            # The default device is looked after by itself.
            entered = _get_current_function_mode_stack()
            functions = tuple(mode for mode in entered if not isinstance(mode, DeviceContext))
        if num_dispatch_modes() > 0:
            lock = threading.RLock()
            found = _get_current_dispatch_mode_stack()
            # torch's own modes for tracing and for tensors without data are of one thread.
            if all(getattr(mode, "_mode_key", None) is None for mode in found):
                operators = tuple(_OneAtATime(mode, lock) for mode in found)
        hooks = current_hooks()
        if not (functions or operators or hooks):
            return None
        return cls(threading.get_ident(), functions, operators, hooks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block the current thread is under the same."""
        is_caller = threading.get_ident() == self.thread
        with ExitStack() as stack:
            if self.operators and is_caller:
                stack.enter_context(_disable_current_modes())
            for mode in self.operators:
                stack.enter_context(_pushed(mode))
            for function_mode in () if is_caller else self.functions:
                torch._C._push_on_torch_function_stack(function_mode)
                stack.callback(torch._C._pop_torch_function_stack)
            if self.hooks is not None and not is_caller:
                torch._C._autograd._push_saved_tensors_default_hooks(*self.hooks)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            yield


@contextmanager
def _pushed(mode: TorchDispatchMode) -> Iterator[None]:
    # Not entered, which the mode would take for another block that it is used in.
    torch._C._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        torch._C._pop_torch_dispatch_stack(None)


class _OneAtATime(TorchDispatchMode):
    """A mode of the caller, which sees the operators of all replicas one after another."""

    def __init__(self, mode: TorchDispatchMode, lock: threading.RLock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._lock = lock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets the mode do what it does."""
        is_taken = self._lock.acquire(timeout=_PATIENCE_S)
        try:
            return self._mode.__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            if is_taken:
                self._lock.release()
