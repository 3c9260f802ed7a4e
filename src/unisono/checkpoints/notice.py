"""How a process learns that it is about to be ended: a signal, or a function that says so."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from unisono.arguments import check_callable, check_timeout, in_words
from unisono.errors import ContextError, UnsupportedError
from unisono.strategies.elastic_leaving import PREEMPTED, READY, READY_ALONE, UNDISTURBED

# How long a worker of an elastic job goes on, since others may be preempted at the same time.
_PATIENCE_SECONDS = 1.0


def _exit() -> None:
    sys.exit(0)


@dataclass(frozen=True)
class TerminationConfig:
    """How a process learns that it is about to be ended, and how it then leaves.

    SIGTERM is always watched.

    Args:
        termination_watcher_fn: What else announces the end: a function that returns True once it
            is announced, for example `lambda: os.path.exists("stop")`, or a signal, such as
            `signal.SIGUSR1`. A thread calls the function about every half second.
        exit_fn: What leaves the program after saving. None means `sys.exit(0)`. Platforms that
            restart only a program that failed need another status: `lambda: sys.exit(42)`. If it
            returns, the training goes on, except on a worker that has left an elastic job.
        grace_period: The seconds from the announcement to the end. None or 0 means to save and
            leave after the current step. With a longer time, training goes on as long as three
            steps and three saves still fit. If nothing has been saved before, half of the time is
            left for saving.
        save_fn: What saves, on all workers. None means `CheckpointManager.save`.

    Raises:
        UnsupportedError: If an argument has another type.
    """

    termination_watcher_fn: Callable[[], bool] | signal.Signals | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        watcher = self.termination_watcher_fn
        if not (watcher is None or isinstance(watcher, signal.Signals) or callable(watcher)):
            raise UnsupportedError(
                "`termination_watcher_fn` must be a function that returns whether the end is "
                f"announced, or a signal such as `signal.SIGUSR1`, got {in_words(watcher)}."
            )
        for name in ("exit_fn", "save_fn"):
            if getattr(self, name) is not None:
                check_callable(name, getattr(self, name))
        check_timeout("grace_period", self.grace_period)


class Notice:
    """Notes when the end of this process was announced, and says when it is time to leave."""

    def __init__(self, config: TerminationConfig) -> None:
        watcher = config.termination_watcher_fn
        self.step_seconds = 0.0
        self.save_seconds = 0.0
        self.is_leaving = False
        self._config = config
        self._came_at: float | None = None
        self._grace = config.grace_period or 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._is_announced = None if isinstance(watcher, signal.Signals) else watcher
        if threading.current_thread() is threading.main_thread():
            own = [watcher] if isinstance(watcher, signal.Signals) else []
            for number in {signal.SIGTERM, *own}:
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._note)
        elif self._is_announced is None:
            raise ContextError(
                "The handler was made outside the main thread, where Python cannot watch signals. "
                "Make it in the main thread, or give `TerminationConfig` a "
                "`termination_watcher_fn` that can be called."
            )

    @property
    def needs_thread(self) -> bool:
        """Whether a thread must call `look` now and then."""
        return self._is_announced is not None

    def look(self) -> None:
        """Asks the function whether the end is announced."""
        if self._came_at is None and self._is_announced is not None and self._is_announced():
            self._came_at = time.monotonic()

    def is_due(self) -> bool:
        """Returns whether it is time to save and leave."""
        if self._came_at is None:
            return False
        needed = 3 * (self.step_seconds + self.save_seconds)
        if not self.save_seconds:
            needed = max(needed, self._grace / 2)
        return time.monotonic() >= self._came_at + self._grace - needed

    def sign(self) -> int:
        """Returns what to tell the other workers of an elastic job; see `Departures`."""
        if self._came_at is None:
            return UNDISTURBED
        if not self.is_due():
            return PREEMPTED
        has_waited = time.monotonic() >= self._came_at + _PATIENCE_SECONDS
        return READY_ALONE if has_waited else READY

    def leave(self) -> None:
        """Leaves the program, as the configuration says."""
        self.is_leaving = True
        (self._config.exit_fn or _exit)()
        self.is_leaving = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. It takes no lock, because the interrupted code may hold it."""
        if self._came_at is None:
            self._came_at = time.monotonic()
        previous = self._previous.get(signal.Signals(number))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def close(self) -> None:
        """Gives the signals back to the handlers that they had before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            # None is a handler that was not set by Python, and cannot be set again.
            if previous is not None and signal.getsignal(number) == self._note:
                signal.signal(number, previous)
        self._previous = {}
