"""What the caller of `run` has set for its own thread, and its replicas must see too."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from unisono.contexts.current import stack
from unisono.engines.random_operators import drawing
from unisono.sharing import in_place_of
from unisono.torch_private import (
    TorchDispatchMode,
    num_dispatch_modes,
    num_function_modes,
    set_grad_enabled,
    without_dispatch_modes,
)

T = TypeVar("T")

_CPU = torch.device("cpu")
Hooks: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


# An operator that waits for another replica, as one of the user's own may, must not stop that one.
_PATIENCE_S = 1.0


class _Noted(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


# What the current thread has entered, the innermost last.
_noted = _Noted()


def _current_hooks() -> Hooks | None:
    """Returns the innermost hooks for saved tensors of the current thread."""
    if _ask is not None:
        found: Hooks | None = _ask(False)  # noqa: FBT003
        return found
    return _noted.hooks[-1] if _noted.hooks else None


if _ask is None:
    # torch tells the hooks from 2.7 on. With 2.6 the class that sets them is made to note them.
    _enter, _leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    @in_place_of(saved_tensors_hooks, "__enter__")
    def _noting_enter(self: Any) -> None:
        _enter(self)
        _noted.hooks.append((self.pack_hook, self.unpack_hook))

    @in_place_of(saved_tensors_hooks, "__exit__")
    def _noting_leave(self: Any, *error: object) -> None:
        _noted.hooks.pop()
        _leave(self, *error)


@dataclass(frozen=True)
class CallerModes:
    """Modes and hooks that the caller of `run` is under, and that see what all replicas do.

    torch keeps them for each thread. `FlopCounterMode` is a mode for operators, a default device is
    one for functions, `saved_tensors_hooks` and `save_on_cpu` are hooks. What a mode counts must
    not be counted by threads at the same time, so a mode for operators sees one at a time.
    """

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
            # A mode may only say what is so without it: that new tensors are on the CPU.
            functions = tuple(
                mode
                for mode in _get_current_function_mode_stack()
                if not (isinstance(mode, DeviceContext) and mode.device == _CPU)
            )
        if num_dispatch_modes() > 0:
            lock = threading.RLock()
            found = _get_current_dispatch_mode_stack()
            # torch's own modes for tracing and for tensors without data are of one thread.
            if all(getattr(mode, "_mode_key", None) is None for mode in found):
                operators = tuple(_OneAtATime(mode, lock) for mode in found)
        hooks = _current_hooks()
        if not (functions or operators or hooks):
            return None
        return cls(threading.get_ident(), functions, operators, hooks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block the current thread is under the same."""
        is_caller = threading.get_ident() == self.thread
        with ExitStack() as stack:
            if self.operators and is_caller:
                stack.enter_context(without_dispatch_modes())
            for mode in self.operators:
                # Not entered, which the mode would take for another block that it is used in.
                torch._C._push_on_torch_dispatch_stack(mode)
                stack.callback(torch._C._pop_torch_dispatch_stack, None)
            for function_mode in () if is_caller else self.functions:
                torch._C._push_on_torch_function_stack(function_mode)
                stack.callback(torch._C._pop_torch_function_stack)
            if self.hooks is not None and not is_caller:
                torch._C._autograd._push_saved_tensors_default_hooks(*self.hooks)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            yield


def modes_need_turns(*, more: bool) -> bool:
    """Whether replicas must run one after another, because of modes of this thread, or `more`.

    When a mode first sees an operator, torch looks for its Python object, and up to torch 2.12 two
    threads must not do that at once, even if they have the interpreter lock in turns.
    """
    return more or num_dispatch_modes() > 0


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


class ThreadState:
    """What a run changes on a thread: on that of its caller, which is replica 0's, or another.

    The code that changes it also restores it, but Ctrl-C, or the end of a step that has failed on
    another replica, may end that halfway.
    """

    __slots__ = (
        "_depth",
        "_is_drawing",
        "_is_grad_enabled",
        "_is_multithreaded",
        "_modes",
        "_profile",
    )

    def __init__(self) -> None:
        self._depth = len(stack.entered)
        self._modes = _entered_modes()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_multithreaded = torch._C._is_multithreading_enabled()
        self._is_drawing = drawing.is_on()
        self._profile = sys.getprofile()

    def restore(self) -> None:
        """After a run that has failed: the thread is as it was."""
        del stack.entered[self._depth :]
        set_grad_enabled(self._is_grad_enabled)
        torch._C._set_multithreading_enabled(self._is_multithreaded)
        drawing.turn(is_on=self._is_drawing)
        if sys.getprofile() is not self._profile:
            sys.setprofile(self._profile)
        functions, operators = self._modes
        left = _entered_modes()
        for _ in left[0]:
            torch._C._pop_torch_function_stack()
        # torch 2.6 crashes if nothing refers to a mode that is taken away.
        for _ in left[1]:
            torch._C._pop_torch_dispatch_stack(None)
        for function_mode in functions:
            torch._C._push_on_torch_function_stack(function_mode)
        for mode in operators:
            torch._C._push_on_torch_dispatch_stack(mode)


def _entered_modes() -> tuple[list[TorchFunctionMode], list[TorchDispatchMode]]:
    functions = _get_current_function_mode_stack() if num_function_modes() > 0 else []
    return functions, _get_current_dispatch_mode_stack() if num_dispatch_modes() > 0 else []


@dataclass(eq=False)
class Ambient:
    """The modes, hooks, context variables and CUDA streams of a thread."""

    is_grad_enabled: bool
    is_inference: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]
    variables: contextvars.Context
    streams: dict[torch.device, torch.cuda.Stream]
    # Modes for operators and functions, such as `FlopCounterMode`, and hooks for saved tensors.
    modes: CallerModes | None

    @classmethod
    def of_this_thread(cls, places: Sequence[torch.device]) -> Ambient:
        """Notes what is set now, for use on `places`."""
        autocasts: tuple[tuple[str, torch.dtype, bool], ...] = ()
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                is_cached = torch.is_autocast_cache_enabled()
                autocasts += ((kind, torch.get_autocast_dtype(kind), is_cached),)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocasts,
            contextvars.copy_context(),
            {place: torch.cuda.current_stream(place) for place in places if place.type == "cuda"},
            CallerModes.of_this_thread(),
        )

    def call(
        self, fn: Callable[[], T], place: torch.device, stream: torch.cuda.Stream | None = None
    ) -> T:
        """Calls `fn` on `place`, in any thread, as if it were the one that was noted."""
        # A context can be entered by one thread at a time, so each replica gets a copy.
        return self.variables.copy().run(self._call, fn, place, stream)

    def _call(
        self, fn: Callable[[], T], place: torch.device, stream: torch.cuda.Stream | None
    ) -> T:
        was_enabled = torch.is_grad_enabled()
        was_multithreaded = torch._C._is_multithreading_enabled()
        set_grad_enabled(self.is_grad_enabled)
        # Backward then runs on the replica's own thread, on every device: a thread that several
        # replicas share could wait for itself.
        torch._C._set_multithreading_enabled(False)  # noqa: FBT003
        try:
            is_plain = not (self.is_inference or self.autocasts or self.modes)
            if is_plain and place.type == "cpu":
                return fn()
            with self._entered(place, stream):
                return fn()
        finally:
            set_grad_enabled(was_enabled)
            torch._C._set_multithreading_enabled(was_multithreaded)

    @contextmanager
    def _entered(self, place: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
        with ExitStack() as stack:
            enter: Callable[[Any], Any] = stack.enter_context
            if place.type == "cuda":
                # A device that counts as current already would leave a new thread without it.
                torch.cuda.set_device(place)
                # Also those of other GPUs, where this thread may reduce what others have computed.
                for gpu, other in self.streams.items():
                    if gpu != place and other != torch.cuda.current_stream(gpu):
                        enter(torch.cuda.stream(other))
                enter(torch.cuda.stream(stream or self.streams[place]))
            if self.is_inference:
                enter(torch.inference_mode())
                set_grad_enabled(self.is_grad_enabled)
            for kind, dtype, is_cached in self.autocasts:
                enter(torch.autocast(kind, dtype, cache_enabled=is_cached))
            if self.modes is not None:
                enter(self.modes.entered())
            yield
