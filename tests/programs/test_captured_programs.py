"""On a GPU, the programs end the same way whether their steps are captured or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import programs.all  # noqa: F401 - brings in the programs
import unisono as uo
from programs.running import PROGRAMS, Outcome, outcome_of
from unisono.testing import virtual_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


def on_gpus(name: str, num_replicas: int, mark: Callable[..., Any]) -> Outcome:
    """Runs a program on virtual GPUs, with each of its steps marked."""
    with virtual_gpus(num_replicas):
        strategy: Any = uo.MirroredStrategy(
            [f"cuda:{i}" for i in range(num_replicas)], **PROGRAMS[name][1].strategy
        )
        run = strategy.run
        strategy.run = lambda fn, args=(), **rest: run(mark(fn), args, **rest)
        try:
            return outcome_of(name, strategy)
        finally:
            strategy.close()


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_captured_steps_end_as_eager_ones(name: str, num_replicas: int) -> None:
    settings = PROGRAMS[name][1]
    pytest.importorskip(settings.package)
    eager = on_gpus(name, num_replicas, lambda fn: fn)
    if eager.error and settings.error is None:
        pytest.skip(f"it is written for CPUs: {eager.message}")
    captured = on_gpus(name, num_replicas, uo.function)
    assert captured.error == eager.error, captured.traceback
    assert captured.learned.keys() == eager.learned.keys()
    for key, values in eager.learned.items():
        limit = settings.tolerance
        np.testing.assert_allclose(
            captured.learned[key], values, rtol=limit, atol=limit, err_msg=key
        )
