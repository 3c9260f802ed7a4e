"""A strategy says once that its replicas wait for the interpreter, and what to do."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as uo
from unisono.engines import Interpreter
from unisono.tracing.lock_waits import can_measure, has_lock

Make = Callable[..., uo.MirroredStrategy]
measurable = pytest.mark.skipif(not can_measure(), reason="only Linux counts waits for a core")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns what was said about the interpreter."""
    caplog.set_level(logging.INFO, logger="unisono")
    return lambda: [text for text in caplog.messages if "interpreter" in text]


def test_more_than_a_fifth_is_told_once_with_what_to_do(told: Any) -> None:
    interpreter = Interpreter(4, is_serial=False)

    interpreter.judge(0.2)
    assert told() == []
    interpreter.judge(0.43)
    interpreter.judge(0.9)

    (text,) = told()
    assert "43 % of a step" in text
    for way in ("unisono.function(step)", "unisono launch -n 4", "free-threaded Python"):
        assert way in text


@measurable
@pytest.mark.parametrize(
    ("num_replicas", "is_serial", "expected"),
    [
        (2, False, [*range(20, 30), *range(1020, 1030)] if has_lock() else []),
        (1, False, []),
        (2, True, []),
    ],
)
def test_ten_runs_in_a_thousand_are_measured(
    num_replicas: int, is_serial: bool, expected: list[int]
) -> None:
    interpreter = Interpreter(num_replicas, is_serial=is_serial)

    def is_wrapped() -> bool:
        calls = [lambda: None] * num_replicas
        return interpreter.run(calls, lambda own: [own is not calls])[0] is True

    assert [number for number in range(1100) if is_wrapped()] == expected


def test_results_and_errors_of_a_measured_run_are_those_of_any_other(mirrored: Make) -> None:
    strategy = mirrored(2)

    def step(number: int) -> torch.Tensor:
        context = uo.get_replica_context()
        assert context is not None
        if number == 25 and context.replica_id_in_sync_group == 1:
            raise ValueError("on purpose")
        total: torch.Tensor = context.all_reduce("SUM", torch.tensor(float(number)))
        return total

    for number in range(32):
        if number == 25:
            with pytest.raises(ValueError, match="on purpose"):
                strategy.run(step, args=(number,))
        else:
            found = strategy.experimental_local_results(strategy.run(step, args=(number,)))
            assert [float(one) for one in found] == [2.0 * number] * 2


@measurable
@pytest.mark.skipif(not has_lock(), reason="there is no lock to wait for")
def test_a_program_whose_replicas_run_python_is_told(mirrored: Make, told: Any) -> None:
    strategy = mirrored(2)

    def step(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    for _ in range(20):
        strategy.run(step, args=(0.0,))
    wall, used = time.perf_counter(), time.process_time()
    for _ in range(10):
        strategy.run(step, args=(0.02,))
    wall, used = time.perf_counter() - wall, time.process_time() - used

    if used < 0.8 * wall:
        pytest.skip("other programs had the cores, so the replicas waited for these")
    (text,) = told()
    assert "Replicas wait for Python's interpreter lock" in text


@measurable
def test_a_trace_has_the_share(mirrored: Make, tmp_path: Path) -> None:
    strategy = mirrored(2)

    with uo.tracing.record(tmp_path) as trace:
        for _ in range(9):
            strategy.run(lambda: torch.ones(2) + 1)

    summary = trace.summary()
    assert summary.interpreter is not None
    assert 0.0 <= summary.interpreter <= 1.0
    assert summary.interpreter == 0.0 or has_lock()
    assert "Waiting for the interpreter: " in str(summary)
    measured = [event for event in trace.workers()[0].events() if event.category == "interpreter"]
    assert len(measured) == 2


@measurable
def test_without_the_lock_nobody_waits_for_it(
    mirrored: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    strategy = mirrored(2)

    with uo.tracing.record(tmp_path) as trace:
        strategy.run(lambda: torch.ones(2) + 1)

    assert trace.summary().interpreter == 0.0


def test_one_replica_waits_for_nobody(mirrored: Make, tmp_path: Path) -> None:
    strategy = mirrored(1)

    with uo.tracing.record(tmp_path) as trace:
        strategy.run(lambda: torch.ones(2) + 1)

    assert trace.summary().interpreter is None
    assert "interpreter" not in str(trace.summary())
