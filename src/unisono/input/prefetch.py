"""Steps drawn ahead of use, on a separate thread.

draw, draw, draw ...  ->  at most `size` steps  ->  next(), next() ...
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# A draw cannot be interrupted. After this long its thread is left to end when the draw does.
_PATIENCE_S = 10.0


class Steps(Iterator[T]):
    """Draws each step when it is asked for."""

    def __init__(self, draw: Callable[[], T]) -> None:
        self._draw = draw

    def __next__(self) -> T:
        return self._draw()

    def close(self) -> None:
        """Draws no more."""


class Prefetcher(Steps[T]):
    """Draws the first step when it is asked for, and from then on up to `size` steps ahead.

    Steps come in order. An error that `draw` raises is raised by the `next` of its step, and
    drawing goes on as it would without a thread. The thread ends with the last step, with `close`
    and when this object is no more.
    """

    def __init__(self, draw: Callable[[], T], size: int) -> None:
        super().__init__(draw)
        self._buffer: _Buffer[T] | None = None
        self._size = size

    def __next__(self) -> T:
        if self._buffer is None:
            # Many a sampler draws its seed here, from the global generator: in the caller's thread.
            step = self._draw()
            self._buffer = _Buffer(self._size)
            thread = threading.Thread(
                target=_fill, args=(self._buffer, self._draw), name="unisono-input", daemon=True
            )
            self._stop = weakref.finalize(self, _stop, self._buffer, thread)
            thread.start()
            return step
        try:
            return self._buffer.get()
        except StopIteration:
            self._stop()
            raise

    def close(self) -> None:
        if self._buffer is not None:
            self._stop()


class _Buffer(Generic[T]):
    """Outcomes of draws, in order: a step, or the error that was raised in its place."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._outcomes: deque[tuple[T | None, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def wait_for_room(self) -> bool:
        """Returns whether there is room, and not the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._outcomes) < self._size)
            return not self._is_closed

    def put(self, step: T | None, error: BaseException | None) -> None:
        with self._changed:
            if not self._is_closed:
                self._outcomes.append((step, error))
                self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._outcomes)
            if not self._outcomes:
                raise StopIteration
            step, error = self._outcomes.popleft()
            self._changed.notify_all()
        try:
            if error is not None:
                raise error
        finally:
            # The traceback holds this frame, and with the error in it the source: forever.
            del error
        return step  # type: ignore[return-value]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._outcomes.clear()
            self._changed.notify_all()


def _fill(buffer: _Buffer[T], draw: Callable[[], T]) -> None:
    while buffer.wait_for_room():
        try:
            buffer.put(draw(), None)
        except BaseException as error:
            buffer.put(None, error)
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                return


def _stop(buffer: _Buffer[T], thread: threading.Thread) -> None:
    buffer.close()
    # The garbage collector may run this anywhere, on that thread too.
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_S)
