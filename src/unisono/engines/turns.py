"""Whose turn it is: all replicas at once, or one after another."""

from __future__ import annotations

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

    This makes a debugger usable: while one replica stands at a breakpoint the others do too.
    """

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._lock = threading.Lock()
        self._bells = [make_bell(num_replicas) for _ in range(num_replicas)]
        # Those who have not ended, in the order of their turns from now on; the first one runs.
        # Replaced as a whole, by the one who has the lock.
        self._line = tuple(range(num_replicas))
        self._is_free = False

    def begin(self, replica_id: int) -> None:
        bell = self._bells[replica_id]
        while True:
            seen = bell.count
            if self._is_free or self._line[:1] == (replica_id,):
                return
            bell.wait(seen, _LOOK_AGAIN_S)

    def wait_for(self, replica_id: int, is_over: Callable[[], bool]) -> None:
        while not is_over():
            if self._is_free:
                return super().wait_for(replica_id, is_over)
            with self._lock:
                first, *others = self._line
                self._line = (*others, first)
                following = self._line[0]
            self._bells[following].ring()
            self.begin(replica_id)
        return None

    def leave(self, replica_id: int) -> None:
        with self._lock:
            self._line = tuple(one for one in self._line if one != replica_id)
            following = self._line[:1]
        for other in following:
            self._bells[other].ring()

    def free(self) -> None:
        self._is_free = True
        for bell in self._bells:
            bell.ring()
        super().free()
