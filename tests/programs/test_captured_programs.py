"""The programs end the same way whether their steps are captured or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import programs.all  # noqa: F401 - brings in the programs
import unisono as uo
from programs.running import PROGRAMS, Outcome, outcome_of
from unisono.testing import virtual_gpus

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


def outcome_on(kind: str, name: str, num_replicas: int, mark: Callable[..., Any]) -> Outcome:
    """Runs a program with each of its steps marked."""
    with virtual_gpus(num_replicas) if kind == "cuda" else nullcontext():
        strategy: Any = uo.MirroredStrategy(
            [f"{kind}:{i}" for i in range(num_replicas)], **PROGRAMS[name][1].strategy
        )
        run = strategy.run
        strategy.run = lambda fn, args=(), **rest: run(mark(fn), args, **rest)
        try:
            return outcome_of(name, strategy)
        finally:
            strategy.close()


GPU = pytest.mark.gpu


@pytest.mark.parametrize(
    ("kind", "num_replicas"),
    [("cpu", 1), ("cpu", 2), *(pytest.param("cuda", i, marks=GPU) for i in (1, 2, 4))],
)
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_captured_steps_end_as_eager_ones(
    name: str, kind: str, num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Most of the programs take few steps.
    monkeypatch.setattr("unisono.functions.captured._NUM_EAGER", 1)
    settings = PROGRAMS[name][1]
    pytest.importorskip(settings.package)
    eager = outcome_on(kind, name, num_replicas, lambda fn: fn)
    if eager.error and settings.error is None:
        pytest.skip(f"it is written for CPUs: {eager.message}")
    captured = outcome_on(kind, name, num_replicas, uo.function)
    assert captured.error == eager.error, captured.traceback
    assert captured.learned.keys() == eager.learned.keys()
    for key, values in eager.learned.items():
        limit = settings.tolerance if kind == "cuda" else 0
        np.testing.assert_allclose(
            captured.learned[key], values, rtol=limit, atol=limit, err_msg=key
        )
