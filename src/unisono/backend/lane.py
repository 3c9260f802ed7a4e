"""The order in which the collectives of a group run."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

from unisono.groups import CollectiveWork

_IDLE_SECONDS = 0.05


class Lane:
    """Runs collectives one after the other, in the order in which they were given.

    A caller that waits anyway runs its collective itself if none is before it: two thread switches
    cost more than a small collective. Others go to a thread, which starts with the first of them,
    and ends when it has had nothing to do for a moment.

    What is called on that thread, by a callback of the collective that has just ended, runs before
    all that waits: the callback may wait for it. So the order is the same as where the collective
    had ended before it got its callback.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[CollectiveWork | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._change = threading.Lock()
        self._num_queued = 0
        self._is_served = False
        self._thread: threading.Thread | None = None
        self._serving: int | None = None

    def run(self, work: CollectiveWork, *, is_awaited: bool) -> None:
        """Runs `work` now if it is awaited and nothing is before it, or else soon."""
        if threading.get_ident() == self._serving:
            work.run()
            return
        if is_awaited and self._num_queued == 0 and self._turn.acquire(blocking=False):
            try:
                work.run()
            finally:
                self._turn.release()
            return
        with self._change:
            if not self._is_served:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
                self._is_served = True
            self._num_queued += 1
            # With the lock, so that the thread does not end before it has this.
            self._queue.put(work)

    def close(self) -> None:
        """Returns when everything that was given has ended. May be called twice."""
        with self._change:
            thread, self._thread = self._thread, None
            if self._is_served:
                self._is_served = False
                self._queue.put(None)
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        self._serving = threading.get_ident()
        while (work := self._next()) is not None:
            with self._turn:
                work.run()
            with self._change:
                self._num_queued -= 1
            # Nobody but those who wait for it should keep its tensors.
            del work

    def _next(self) -> CollectiveWork | None:
        """Returns what comes next, or None at the end."""
        work, is_over = None, False
        while work is None and not is_over:
            try:
                work = self._queue.get(timeout=_IDLE_SECONDS)
                is_over = work is None
            except Empty:
                is_over = True
            with self._change:
                is_over = is_over and self._queue.empty()
                if is_over:
                    self._is_served, self._serving = False, None
        return work
