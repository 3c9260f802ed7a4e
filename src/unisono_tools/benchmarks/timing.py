"""Competitors that take turns, and the times of their turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

Work: TypeAlias = Callable[[], object]
Series: TypeAlias = list[float]

MIN_TURNS = 5
# The threads of an OpenMP runtime spin after their work, those of libgomp for 4 to 8 ms. They must
# not take a core from the next in turn.
REST_S = 10e-3
_MIN_TURN_S = 2e-3


def take_turns(works: Mapping[str, Work], *, budget_s: float) -> dict[str, Series]:
    """Returns the seconds of each work, a number a turn; turns are taken until the budget is spent.

    Turns make a noisy machine disturb all competitors alike. A rest between them keeps one from
    disturbing the next, and a first call that does not count brings back what its caches lost.
    Work that takes less than two milliseconds is repeated within its turn, whose number is then
    the mean.
    """
    repeats = {name: _repeats(work) for name, work in works.items()}
    times: dict[str, Series] = {name: [] for name in works}
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(next(iter(times.values()))) < MIN_TURNS:
        for name, work in works.items():
            time.sleep(REST_S)
            work()
            times[name].append(_seconds(work, repeats[name]))
    return times


def percentile(series: Sequence[float], percent: float) -> float:
    """Returns the number that `percent` of the series do not exceed, between two if need be."""
    return float(np.percentile(series, percent))


def _repeats(work: Work) -> int:
    quickest = min(_seconds(work, 1) for _ in range(4))
    return max(1, int(_MIN_TURN_S / max(quickest, 1e-7)))


def _seconds(work: Work, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats
