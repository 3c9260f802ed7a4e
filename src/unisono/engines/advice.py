"""Warnings, given once: replicas wait for the interpreter lock, or draw from shared generators."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from unisono.tracing.lock_waits import LockWaits, can_measure, has_lock
from unisono.tracing.spans import is_recording, metered, span

Calls: TypeAlias = Sequence[Callable[[], Any]]

_log = logging.getLogger("unisono")
# A measured run takes some tens of microseconds longer, so ten in a thousand are measured. Not the
# first ones, which compile, allocate and load.
_PERIOD, _FIRST, _NUM_MEASURED = 1000, 20, 10
# Of the runs that somebody records, one in this many is measured.
_RECORDED_PERIOD = 8
_MUCH = 0.2


class Interpreter:
    """Measures in some runs of a strategy how long replicas wait for the interpreter."""

    def __init__(self, num_replicas: int, *, is_serial: bool) -> None:
        self._num_replicas = num_replicas
        self._has_lock = has_lock()
        self._is_on = num_replicas > 1 and not is_serial and can_measure()
        self._num_runs = 0
        self._shares: list[float] = []
        self._has_told = False

    def run(self, calls: Calls, run_all: Callable[[Calls], list[Any]]) -> list[Any]:
        """Returns what `run_all` makes of the calls of all replicas; measures some of the runs."""
        if not self._is_due():
            return run_all(calls)
        waits = LockWaits()
        with metered(waits) as is_mine:
            if is_mine and self._has_lock:
                calls = [waits.of_replica(call) for call in calls]
            results = run_all(calls)
            share = waits.share()
        if is_mine:
            with span("interpreter", "interpreter", share=round(share, 4)):
                self._shares.append(share)
            if len(self._shares) == _NUM_MEASURED:
                self.judge(median(self._shares))
                self._shares.clear()
        return results

    def _is_due(self) -> bool:
        """Counts a run, and returns whether it is to be measured."""
        if not self._is_on:
            return False
        number, self._num_runs = self._num_runs, self._num_runs + 1
        if is_recording():
            return number % _RECORDED_PERIOD == 0
        is_sampled = 0 <= number % _PERIOD - _FIRST < _NUM_MEASURED
        return is_sampled and self._has_lock and not self._has_told

    def judge(self, share: float) -> None:
        """Logs a warning, once, if replicas wait for the interpreter for that part of a step."""
        if share <= _MUCH or self._has_told:
            return
        self._has_told = True
        _log.warning(
            "Replicas wait for Python's interpreter lock for %d %% of a step, because one process "
            "runs the Python code of one replica at a time. To avoid this, capture the step "
            "(`strategy.run(unisono.function(step), ...)`), start one process per replica (for "
            "example `unisono launch -n %d SCRIPT`, with `MultiWorkerMirroredStrategy`), or use "
            'free-threaded Python. The page "One process or many" of the documentation says when '
            "to do which.",
            round(100 * share),
            self._num_replicas,
        )


# To read the states takes some microseconds, so only the first runs are watched.
_NUM_WATCHED_RUNS = 3


class GlobalRandomness:
    """Watches the global generators of Python and NumPy in the first runs of a strategy."""

    def __init__(self) -> None:
        self._num_left = _NUM_WATCHED_RUNS

    def before(self) -> tuple[Any, ...] | None:
        """Returns their states before a run; None if nobody watches any more."""
        if self._num_left == 0:
            return None
        self._num_left -= 1
        return _states()

    def after(self, before: tuple[Any, ...] | None) -> None:
        """Logs a warning, once, if something was drawn since."""
        if before is None:
            return
        drawn = [
            name for (name, then), (_, now) in zip(before, _states(), strict=True) if then != now
        ]
        if drawn:
            self._num_left = 0
            _log.warning(
                "A step has drawn from %s, which all replicas share: which replica gets which "
                "number changes from run to run. Use torch's random functions, which each replica "
                "has for itself, or a generator of the replica's own, such as "
                "`random.Random(seed + replica_id)`; or draw in the input pipeline.",
                " and ".join(drawn),
            )


def _states() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)
    of_numpy = state[1][:2].tolist(), state[2]
    return ("Python's `random`", random.getstate()), ("`numpy.random`", of_numpy)
