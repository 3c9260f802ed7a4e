"""Telling once if a step draws from generators that Python and NumPy have for all threads."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np

_log = logging.getLogger("unisono")
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
    _, keys, position, *_ = state
    return ("Python's `random`", random.getstate()), (
        "`numpy.random`",
        (keys[:2].tolist(), position),
    )
