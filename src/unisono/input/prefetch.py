"""Steps drawn ahead of use, on a separate thread.

draw, draw, draw ...  ->  at most `size` steps  ->  next(), next() ...
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data._utils import signal_handling

from unisono.sharing import computed_once, in_place_of
from unisono.system import lock_across_forks
from unisono.tracing.lock_waits import has_lock

T = TypeVar("T")

# A draw cannot be interrupted. After this long its thread is left to end when the draw does.
_PATIENCE_S = 10.0


class Prefetcher(Iterator[T]):
    """Draws the first step when it is asked for, and from then on up to `size` steps ahead.

    A size of 0 draws each step when it is asked for. An error that `draw` raises is raised by the
    `next` of its step, and drawing goes on as it would without a thread. The thread ends with the
    last step, with `close` and when this object is no more.
    """

    def __init__(self, draw: Callable[[], T], size: int) -> None:
        self._draw = draw
        self._size = size
        self._buffer: _Buffer[T] | None = None
        self._has_ended = False

    def __next__(self) -> T:
        if self._has_ended:
            raise StopIteration
        try:
            if self._buffer is not None:
                return self._buffer.get()
            # Many a sampler draws its seed here, from the global generator: in the caller's thread.
            step = self._draw()
        except StopIteration:
            self.close()
            raise
        if self._size:
            if not has_lock():
                guard_list_of_processes()
            self._buffer = _Buffer(self._size)
            thread = threading.Thread(
                target=self._buffer.fill, args=(self._draw,), name="unisono-input", daemon=True
            )
            self._stop = weakref.finalize(self, _stop, self._buffer, thread)
            thread.start()
        return step

    def close(self) -> None:
        """Draws no more."""
        self._has_ended = True
        if self._buffer is not None:
            self._stop()
            self._buffer = None


class _Buffer(Generic[T]):
    """Outcomes of draws, in order: a step, or the error that was raised in its place.

    The garbage collector may call `close` on a thread that is in another method. A `SimpleQueue`
    allows this.
    """

    def __init__(self, size: int) -> None:
        self._outcomes: queue.SimpleQueue[tuple[T | None, BaseException | None]]
        self._outcomes = queue.SimpleQueue()
        # Has an entry for each step that may be drawn.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(size):
            self._room.put(None)
        self._is_closed = False

    def fill(self, draw: Callable[[], T]) -> None:
        while True:
            self._room.get()
            if self._is_closed:
                return
            try:
                self._outcomes.put((draw(), None))
            except BaseException as error:
                self._outcomes.put((None, error))
                if isinstance(error, StopIteration) or not isinstance(error, Exception):
                    return

    def get(self) -> T:
        step, error = self._outcomes.get()
        self._room.put(None)
        try:
            if error is not None:
                raise error
        finally:
            # The traceback holds this frame, and with the error in it the source: forever.
            del error
        return step  # type: ignore[return-value]

    def close(self) -> None:
        self._is_closed = True
        self._room.put(None)
        # For a thread that waits for the next step.
        self._outcomes.put((None, StopIteration()))


def _stop(buffer: _Buffer[T], thread: threading.Thread) -> None:
    buffer.close()
    # The garbage collector may run this anywhere, on that thread too.
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_S)


@computed_once
def guard_list_of_processes() -> None:
    """Lets one thread at a time use torch's list of the processes of all data loaders.

    The main thread reads it when a process ends, in the handler of a signal. A thread that draws
    ahead adds processes to it, and removes them. At the same time, both would end in a crash.
    """
    # The thread that holds it may get the signal.
    lock = lock_across_forks()
    for name in ("_error_if_any_worker_fails", "_remove_worker_pids", "_set_worker_pids"):
        in_place_of(signal_handling, name)(_locked(getattr(signal_handling, name), lock))


def _locked(call: Callable[..., Any], lock: Any) -> Callable[..., Any]:
    def locked(*args: Any) -> Any:
        with lock:
            return call(*args)

    return locked
