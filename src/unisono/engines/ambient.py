"""What the caller of `run` has set for its own thread, and its replicas must see too."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from unisono.contexts.current import stack
from unisono.engines.caller_modes import CallerModes, default_device
from unisono.engines.random_operators import drawing
from unisono.torch_private import num_function_modes, set_grad_enabled

T = TypeVar("T")

_CPU = torch.device("cpu")


class CallerThread:
    """What a run changes on the thread of its caller, which is the thread of replica 0.

    The code that changes it also restores it, but Ctrl-C may end that halfway.
    """

    __slots__ = ("_depth", "_is_drawing", "_is_grad_enabled", "_is_multithreaded")

    def __init__(self) -> None:
        self._depth = len(stack.entered)
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_multithreaded = torch._C._is_multithreading_enabled()
        self._is_drawing = drawing.is_on()

    def restore(self) -> None:
        """After a run that has failed: the thread is as it was."""
        del stack.entered[self._depth :]
        set_grad_enabled(self._is_grad_enabled)
        torch._C._set_multithreading_enabled(self._is_multithreaded)
        drawing.turn(is_on=self._is_drawing)


@dataclass(frozen=True)
class Ambient:
    """The modes, hooks, default device, context variables and CUDA streams of a thread."""

    is_grad_enabled: bool
    is_inference: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]
    default_device: torch.device | None
    variables: contextvars.Context
    streams: dict[torch.device, torch.cuda.Stream]
    # Modes for operators and functions, such as `FlopCounterMode`, and hooks for saved tensors.
    modes: CallerModes | None

    @classmethod
    def of_this_thread(cls, places: Sequence[torch.device]) -> Ambient:
        """Notes what is set now, for use on `places`."""
        is_cached = torch.is_autocast_cache_enabled()
        autocasts = tuple(
            (kind, torch.get_autocast_dtype(kind), is_cached)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
        # A default device is a mode for all torch functions, and takes long to ask for.
        has_modes = num_function_modes() > 0
        device = default_device() if has_modes else None
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocasts,
            device if device != _CPU else None,
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
            if self._is_plain and place.type == "cpu":
                return fn()
            with self._entered(place, stream):
                return fn()
        finally:
            set_grad_enabled(was_enabled)
            torch._C._set_multithreading_enabled(was_multithreaded)

    @property
    def _is_plain(self) -> bool:
        return not (self.is_inference or self.autocasts or self.default_device or self.modes)

    def _others(self, place: torch.device) -> list[torch.cuda.Stream]:
        others = (stream for gpu, stream in self.streams.items() if gpu != place)
        return [one for one in others if one != torch.cuda.current_stream(one.device)]

    @contextmanager
    def _entered(self, place: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
        with ExitStack() as stack:
            enter: Callable[[Any], Any] = stack.enter_context
            if place.type == "cuda":
                # A device that counts as current already would leave a new thread without it.
                torch.cuda.set_device(place)
                # Also those of other GPUs, where this thread may reduce what others have computed.
                for other in self._others(place):
                    enter(torch.cuda.stream(other))
                enter(torch.cuda.stream(stream or self.streams[place]))
            if self.is_inference:
                enter(torch.inference_mode())
                set_grad_enabled(self.is_grad_enabled)
            for kind, dtype, is_cached in self.autocasts:
                enter(torch.autocast(kind, dtype, cache_enabled=is_cached))
            if self.default_device is not None:
                enter(self.default_device)
            if self.modes is not None:
                enter(self.modes.entered())
            yield
