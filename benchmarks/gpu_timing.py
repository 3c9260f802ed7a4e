"""Competitors on a GPU, taken in turn and timed with device events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TypeAlias

import torch

Work: TypeAlias = Callable[[], object]


def interleaved(works: dict[str, Work], *, rounds: int, calls: int) -> dict[str, float]:
    """Returns the median milliseconds of a call of each; calls of a turn are back to back."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            work()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / calls)
    return {name: statistics.median(series) for name, series in times.items()}
