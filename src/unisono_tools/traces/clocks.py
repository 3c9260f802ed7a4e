"""Puts the traces of all workers on the clock of the first.

Workers on one host read one clock. Between hosts, collectives align the clocks: a collective in
which all ranks hear from all ends at the same moment on all, up to the time of a message. So the
difference of two clocks is the median difference of the ends of the collectives that both have
recorded, and its change with time that between an early and a late half of them. No message is sent
for it, and a worker may start to record whenever it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from unisono_tools.traces.files import Thread, WorkerTrace, check_workers

# In these collectives, no rank leaves before all have entered.
_MEETINGS = ("all_reduce", "all_gather", "barrier")
# With fewer, or in less time, drift could not be distinguished from noise.
_LEAST_FOR_DRIFT = 20
_LEAST_SECONDS_FOR_DRIFT = 1.0


class Difference(NamedTuple):
    """How far a clock is ahead of another: `offset` at the time `origin`, and more by `drift`."""

    offset: float = 0.0
    drift: float = 0.0
    origin: float = 0.0

    def at(self, time: float) -> float:
        """Returns the difference at a time of the clock that is ahead."""
        return self.offset + self.drift * (time - self.origin)


def align(workers: Sequence[WorkerTrace]) -> list[WorkerTrace]:
    """Returns the traces of `workers` with all times on the clock of the first."""
    check_workers(workers)
    first = workers[0]
    return [first, *(_shifted(other, difference(first, other)) for other in workers[1:])]


def difference(first: WorkerTrace, other: WorkerTrace) -> Difference:
    """Returns how far the clock of `other` is ahead of that of `first`."""
    if first.clock == other.clock:
        return Difference()
    ends = meetings(first)
    samples = sorted((end, end - ends[key]) for key, end in meetings(other).items() if key in ends)
    if not samples:
        return Difference()
    middle = len(samples) // 2
    early, late = _center(samples[:middle] or samples), _center(samples[middle:])
    seconds = (samples[-1][0] - samples[0][0]) / 1e9
    if len(samples) < _LEAST_FOR_DRIFT or seconds < _LEAST_SECONDS_FOR_DRIFT:
        return Difference(_center(samples)[1])
    return Difference(early[1], (late[1] - early[1]) / (late[0] - early[0]), early[0])


def meetings(worker: WorkerTrace) -> dict[tuple[int, int], int]:
    """Returns when each collective in which all meet has ended, by group and number."""
    return {
        (event.arguments["group"], event.arguments["number"]): event.end
        for event in worker.events()
        if event.category == "collective"
        and event.name in _MEETINGS
        and "error" not in event.arguments
    }


def _center(samples: Sequence[tuple[int, int]]) -> tuple[float, float]:
    return median(time for time, _ in samples), median(ahead for _, ahead in samples)


def _shifted(worker: WorkerTrace, ahead: Difference) -> WorkerTrace:
    def here(time: int) -> int:
        return time - round(ahead.at(time))

    threads = [
        Thread(
            thread.name,
            [
                event._replace(start=here(event.start), end=here(event.end))
                for event in thread.events
            ],
        )
        for thread in worker.threads
    ]
    return replace(worker, threads=threads)
