"""Threads that wait for messages of Gloo, and end when they have had nothing to do for a moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

_IDLE_SECONDS = 0.05
_Then: TypeAlias = Callable[[], None] | None
_Begun: TypeAlias = "tuple[Any, timedelta, Message, _Then]"


class Message:
    """A message, and what Gloo uses until its end. A copy that is sent is done at once."""

    __slots__ = ("_ended", "error", "held", "is_done", "peer")

    def __init__(self, peer: int, held: Any, *, is_done: bool = False) -> None:
        self.peer, self.held, self.is_done = peer, held, is_done
        self.error: str | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def end(self, error: str | None) -> None:
        """Lets the thread that waits go on."""
        self.error = None if self.is_done else error
        self.held, self.is_done = None, True
        self._ended.release()

    def wait(self, seconds: float) -> None:
        """Returns when it has ended, or the time is over."""
        if self._ended.acquire(timeout=seconds):
            self._ended.release()


class Waiter:
    """Waits for messages of one peer, one after the other, on a thread while there are any."""

    def __init__(self, name: str) -> None:
        self.unended: set[Message] = set()
        self._name = name
        self._begun: SimpleQueue[_Begun | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_running = False
        self._thread: threading.Thread | None = None

    def add(self, work: Any, limit: timedelta, message: Message, then: _Then = None) -> None:
        """Waits for `work` of Gloo up to a limit, at which Gloo breaks all connections.

        If all goes well it calls `then`.
        """
        self.unended.add(message)
        with self._lock:
            self._begun.put((work, limit, message, then))
            if not self._is_running:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                self._is_running = True

    def _run(self) -> None:
        while (begun := self._next()) is not None:
            work, limit, message, then = begun
            error = None
            try:
                work.wait(limit)
            except RuntimeError as broken:
                error = str(broken).splitlines()[0]
            message.end(error)
            self.unended.discard(message)
            if error is None and then is not None:
                then()

    def _next(self) -> _Begun | None:
        while True:
            try:
                return self._begun.get(timeout=_IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if self._begun.empty():
                        self._is_running = False
                        return None

    def close(self, seconds: float) -> bool:
        """Ends the thread after what was begun, and returns whether it has ended in time."""
        with self._lock:
            self._begun.put(None)
            thread = self._thread
        # The garbage collector may close this from within the thread.
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, seconds))
        return not self.unended
