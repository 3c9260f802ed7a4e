"""Stopping a thread in the middle of user code, and nowhere else."""

from __future__ import annotations

import _imp
import ctypes
import threading
from contextlib import suppress


class ReplicaStopped(BaseException):
    """Ends a replica because the step has failed elsewhere. Not an error for user code to catch."""

    def __str__(self) -> str:
        # Python prints it where it ignores errors, such as in `__del__`.
        return "the step has failed on another replica, so this one was stopped"


class Guard:
    """Says whether a replica's thread is in user code, where it may be stopped at any instruction.

    Our own code must not be: a lock that is just being taken would stay taken forever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread = 0
        self._is_exposed = False
        self._is_stopped = False

    def expose(self) -> None:
        """Before user code: from now on `stop` reaches the current thread. Raises if it came."""
        with self._lock:
            if self._is_stopped:
                raise ReplicaStopped
            self._thread = threading.get_ident()
            self._is_exposed = True

    def cover(self) -> None:
        """After user code: `stop` no longer reaches it. Raises if it already has."""
        with self._lock:
            was_exposed, self._is_exposed = self._is_exposed, False
            if self._is_stopped and was_exposed:
                # What was sent may not have arrived, and must not arrive later. Python up to 3.12
                # remembers that something was sent until it arrives, and then a profiler or
                # debugger would wait forever.
                _send(self._thread, ReplicaStopped)
                while True:
                    pass
            if self._is_stopped:
                raise ReplicaStopped

    def cover_surely(self) -> None:
        """After user code that has failed: covers, even if stopped once more while it does."""
        while True:
            try:
                self.cover()
            except ReplicaStopped:
                if self._is_exposed:
                    continue
            break
        # From Python 3.14 on, a thread can be stopped when it has just taken a lock in `with`. The
        # lock then stays taken.
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()
        # The same is true of the lock of Python's imports, which other threads would wait for.
        with suppress(RuntimeError):
            while _imp.lock_held():
                _imp.release_lock()

    def stop(self, *, is_again: bool = False) -> None:
        """Raises `ReplicaStopped` at the next instruction of user code, or when that begins."""
        with self._lock:
            if self._is_exposed and (is_again or not self._is_stopped):
                _send(self._thread, ReplicaStopped)
            self._is_stopped = True


def _send(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
