"""Whose turn it is, all replicas at once or one after another, and the bells that they wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from unisono.kernels import native_core
from unisono.system import process_cores

if TYPE_CHECKING:
    from unisono import _native

Bell: TypeAlias = "PythonBell | _native.Bell"

# About 200 us. To wake a thread that sleeps takes 25 us or more, and most waits are shorter.
_LOOKS = 5000
# How long Ctrl-C may take, which does not wake a thread that waits for a bell.
_LOOK_AGAIN_S = 0.1


class PythonBell:
    """A bell that counts how often it has rung, where there is no native core."""

    def __init__(self) -> None:
        self.count = 0
        # Taken directly, as a `Condition` is not taken in one instruction.
        self._lock = threading.Lock()
        self._rung = threading.Condition(self._lock)

    def ring(self) -> None:
        """Wakes all who wait."""
        with self._lock:
            self.count += 1
            self._rung.notify_all()

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Waits until it has rung more often than `seen`; False if it has not in time."""
        with self._lock:
            return self._rung.wait_for(lambda: self.count > seen, timeout_s)

    def ring_and_wait(self, other: PythonBell, seen: int, timeout_s: float) -> bool:
        """Rings, and waits until another bell has rung more often than `seen`."""
        self.ring()
        return other.wait(seen, timeout_s)


def make_bell(num_threads: int) -> Bell:
    """Makes a bell; who waits looks for a while before it sleeps if each thread has a core."""
    make = native_core().bell
    if make is None:
        return PythonBell()
    return make(_LOOKS if num_threads <= len(process_cores()) else 0)


class Turns:
    """All replicas run at the same time."""

    def __init__(self, num_replicas: int) -> None:
        # What the first replica waits for, and what the others wait for.
        self._for_first: Any = make_bell(num_replicas)
        self._for_others: Any = make_bell(num_replicas)

    def begin(self, replica_id: int) -> None:
        """Returns when the replica may run for the first time."""

    def wait_for(self, replica_id: int, is_over: Callable[[], bool]) -> None:
        """The replica, which runs, waits until `is_over`, and others may run meanwhile."""
        bell = self._for_others if replica_id else self._for_first
        while True:
            seen = bell.count
            if is_over():
                return
            bell.wait(seen, _LOOK_AGAIN_S)

    def tell_first(self) -> None:
        """Says that what the first replica waits for may be over."""
        self._for_first.ring()

    def tell_others(self) -> None:
        """Says that what the other replicas wait for may be over."""
        self._for_others.ring()

    def num_told(self) -> int:
        """Returns how often the bell of the others has rung."""
        return int(self._for_others.count)

    def tell_first_and_wait(self, num_told: int) -> None:
        """One of the others rings for the first, and waits until its own bell rings again."""
        self._for_first.ring_and_wait(self._for_others, num_told, _LOOK_AGAIN_S)

    def leave(self, replica_id: int) -> None:
        """The replica, which runs, has ended."""

    def free(self) -> None:
        """Lets everybody run to their end, because the step has failed."""
        self._for_first.ring()
        self._for_others.ring()


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

    def tell_first_and_wait(self, num_told: int) -> None:
        self.tell_first()

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
