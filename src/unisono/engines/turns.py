"""Whose turn it is: all replicas at once, or one after another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Turns:
    """All replicas run at the same time."""

    def running(self, replica_id: int) -> AbstractContextManager[None]:
        """Within the block the replica runs."""
        return nullcontext()

    def waiting(self, replica_id: int) -> AbstractContextManager[None]:
        """Within the block, which a running replica enters, it waits for others."""
        return nullcontext()

    def end(self) -> None:
        """Lets everybody run to their end, because the step has failed."""


class OneByOne(Turns):
    """One replica runs at a time, in the order of their ids, until it waits or ends.

    This makes a debugger usable: while one replica stands at a breakpoint the others do too.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # All of them want to begin, also those whose threads have not got so far.
        self._wanting = set(range(num_replicas))
        self._running: int | None = None
        self._last = -1
        self._is_over = False

    @contextmanager
    def running(self, replica_id: int) -> Iterator[None]:
        """See `Turns.running`."""
        self._start(replica_id)
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def waiting(self, replica_id: int) -> Iterator[None]:
        """See `Turns.waiting`."""
        self._stop()
        try:
            yield
        finally:
            self._start(replica_id)

    def _start(self, replica_id: int) -> None:
        with self._lock:
            self._wanting.add(replica_id)
            self._changed.wait_for(lambda: self._is_over or self._is_next(replica_id))
            self._wanting.remove(replica_id)
            self._running = self._last = replica_id

    def _stop(self) -> None:
        with self._lock:
            self._running = None
            self._changed.notify_all()

    def _is_next(self, replica_id: int) -> bool:
        """Whether nobody runs, and this is the next after the last, of those that want to."""
        first = min(self._wanting, key=lambda i: (i - self._last - 1) % self._num_replicas)
        return self._running is None and first == replica_id

    def end(self) -> None:
        """See `Turns.end`."""
        with self._lock:
            self._is_over = True
            self._changed.notify_all()
