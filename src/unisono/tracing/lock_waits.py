"""How long the replicas of one run wait for Python's interpreter lock.

No clock shows this wait, so it is computed as a remainder. A thread runs on a core, is ready and
waits for a core, or is blocked. Linux counts the first two per thread. A replica that is blocked
outside of barriers, collectives and reductions usually waits for the lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_SCHEDULED = "/proc/thread-self/schedstat"


class Reading(NamedTuple):
    """What one thread did with its time, in nanoseconds."""

    wall: int = 0
    running: int = 0
    queued: int = 0
    slices: int = 0

    @property
    def busy(self) -> int:
        """The time in which it ran, or was ready to run."""
        return self.running + self.queued

    @property
    def blocked(self) -> int:
        """The remaining time, as far as the thread may have waited for the lock.

        A thread that waits for the lock wakes up in every interval, to ask for it again.
        """
        interval = round(1e9 * sys.getswitchinterval())
        return max(0, min(self.wall - self.busy, (self.slices + 1) * interval))


class _ThreadClock:
    """Measures the current thread, except while paused."""

    def __init__(self, late: int) -> None:
        self.reading = Reading(wall=late)
        self._file = os.open(_SCHEDULED, os.O_RDONLY)
        self._num_pauses = 0
        self._since = self._now()

    def pause(self) -> None:
        if self._num_pauses == 0:
            times = zip(self.reading, self._since, self._now(), strict=True)
            self.reading = Reading(*(so_far + now - since for so_far, since, now in times))
        self._num_pauses += 1

    def resume(self) -> None:
        self._num_pauses -= 1
        if self._num_pauses == 0:
            self._since = self._now()

    def close(self) -> None:
        os.close(self._file)

    def _now(self) -> Reading:
        _, queued, slices = map(int, os.pread(self._file, 100, 0).split())
        return Reading(time.perf_counter_ns(), time.thread_time_ns(), queued, slices)


class LockWaits:
    """Measures one run, which begins now.

    Every replica makes its call through `of_replica`. In a block `with waits:` it waits for
    something other than the lock. Threads that are no replica may enter one too.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._readings: list[Reading] = []
        self._start = time.perf_counter_ns()

    def of_replica(self, call: Callable[[], T]) -> Callable[[], T]:
        """Returns the call of a replica, which is measured on the thread that makes it."""

        def measured() -> T:
            try:
                clock = _ThreadClock(time.perf_counter_ns() - self._start)
            except OSError:
                # The process may have no file descriptors left, which must not fail a step.
                return call()
            self._own.clock = clock
            try:
                result = call()
                clock.pause()
                self._readings.append(clock.reading)
                return result
            finally:
                del self._own.clock
                clock.close()

        return measured

    def __enter__(self) -> None:
        if (clock := getattr(self._own, "clock", None)) is not None:
            clock.pause()

    def __exit__(self, *error: object) -> None:
        if (clock := getattr(self._own, "clock", None)) is not None:
            clock.resume()

    def share(self) -> float:
        """After the run: returns the part of it in which replicas waited for the lock."""
        return lock_share(self._readings, time.perf_counter_ns() - self._start)


def lock_share(readings: Sequence[Reading], wall: int) -> float:
    """Returns the part of a run that its replicas spent waiting for the lock, on average.

    The estimate is rather too low than too high. A replica waits for the lock only while another
    holds it, so only time in which another replica ran or was queued for a core counts. If threads
    queue for cores, so does the one that holds the lock, and the others really wait for a core.

    Args:
        wall: How long the run took, in nanoseconds.
    """
    busy = sum(reading.busy for reading in readings)
    if busy == 0 or wall == 0:
        return 0.0
    waited = sum(min(reading.blocked, busy - reading.busy) for reading in readings) / len(readings)
    running = sum(reading.running for reading in readings)
    return min(1.0, waited / wall) * min(1.0, busy / wall) * running / busy


def has_lock() -> bool:
    """Returns whether threads of this interpreter take turns."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def can_measure() -> bool:
    """Returns whether the system counts how long a thread waits for a core."""
    try:
        with open(_SCHEDULED) as file:
            return int(file.read().split()[0]) > 0
    except (OSError, ValueError, IndexError):
        return False
