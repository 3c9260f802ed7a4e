"""Whose turn it is: all replicas at once, or one after another."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from unisono.engines.bell import make_bell

# How long Ctrl-C may take, which does not wake a thread that waits for a bell.
_LOOK_AGAIN_S = 0.1


class Turns:
    """All replicas run at the same time."""

    def __init__(self, num_replicas: int) -> None:
        self._changed = make_bell(num_replicas)

    def begin(self, replica_id: int) -> None:
        """Returns when the replica may run for the first time."""

    def wait_for(self, replica_id: int, is_over: Callable[[], bool]) -> None:
        """The replica, which runs, waits until `is_over`, and others may run meanwhile."""
        while True:
            seen = self._changed.count
            if is_over():
                return
            self._changed.wait(seen, _LOOK_AGAIN_S)

    def changed(self) -> None:
        """Says that what somebody waits for may be over."""
        self._changed.ring()

    def leave(self, replica_id: int) -> None:
        """The replica, which runs, has ended."""

    def free(self) -> None:
        """Lets everybody run to their end, because the step has failed."""
        self._changed.ring()


class OneByOne(Turns):
    """One replica runs at a time, in the order of their ids, until it waits or ends.

    This makes a debugger usable: while one replica stands at a breakpoint the others do too. It
    also makes short steps quicker: threads that all want the interpreter at once keep waking each
    other, which takes longer than the step.

    Args:
        num_replicas: How many take turns.
        patience_s: After a turn of this length everybody may run, from then on. Without it nobody
            does before it is their turn.
    """

    def __init__(self, num_replicas: int, patience_s: float | None = None) -> None:
        super().__init__(num_replicas)
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._bells = [make_bell(num_replicas) for _ in range(num_replicas)]
        # Those who have not ended, in the order of their turns from now on; the first one runs.
        self._line = list(range(num_replicas))
        self.is_free = False

    def begin(self, replica_id: int) -> None:
        """See `Turns.begin`."""
        bell = self._bells[replica_id]
        while not self._is_next(replica_id):
            self._sleep(bell.count, replica_id, bell.wait)

    def wait_for(self, replica_id: int, is_over: Callable[[], bool]) -> None:
        """See `Turns.wait_for`."""
        bell = self._bells[replica_id]
        while not is_over():
            if self.is_free:
                return super().wait_for(replica_id, is_over)
            seen = bell.count
            with self._lock:
                self._line.append(self._line.pop(0))
                following = self._bells[self._line[0]]
            # It is to wake when this thread has let go of the interpreter, not before.
            self._sleep(seen, replica_id, functools.partial(bell.wait_after, following))
            while not self._is_next(replica_id):
                self._sleep(bell.count, replica_id, bell.wait)
        return None

    def _is_next(self, replica_id: int) -> bool:
        return self.is_free or self._line[0] == replica_id

    def _sleep(self, seen: int, replica_id: int, wait: Callable[[int, float], bool]) -> None:
        # Between this look and the wait the turn may come: then the bell has rung more often.
        if self._is_next(replica_id):
            return
        if not wait(seen, self._patience_s or _LOOK_AGAIN_S) and self._patience_s is not None:
            self.free()

    def leave(self, replica_id: int) -> None:
        """See `Turns.leave`."""
        with self._lock:
            self._line.remove(replica_id)
            following = self._line[:1]
        for other in following:
            self._bells[other].ring()

    def free(self) -> None:
        """See `Turns.free`."""
        self.is_free = True
        for bell in self._bells:
            bell.ring()
        super().free()
