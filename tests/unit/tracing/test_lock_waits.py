"""How long replicas wait for the interpreter: what counts, and what does not."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from unisono.tracing.lock_waits import LockWaits, Reading, can_measure, lock_share
from unisono.tracing.spans import metered, span

MS = 1_000_000
measurable = pytest.mark.skipif(not can_measure(), reason="only Linux counts waits for a core")


def reading(
    running: float, queued: float = 0.0, blocked: float = 0.0, slices: int = 100
) -> Reading:
    wall = round(MS * (running + queued + blocked))
    return Reading(wall, round(MS * running), round(MS * queued), slices)


@pytest.mark.parametrize(
    ("readings", "wall", "share"),
    [
        ([reading(5), reading(5)], 5, 0.0),
        # They take turns.
        ([reading(5, blocked=5), reading(5, blocked=5)], 10, 0.5),
        ([reading(2, blocked=6)] * 4, 8, 0.75),
        # One goes first, and returns.
        ([reading(5), reading(5, blocked=5)], 10, 0.25),
        # Eight replicas on two cores, with and without somebody in the lock's way.
        ([reading(2, queued=6)] * 8, 8, 0.0),
        ([reading(2, queued=5, blocked=1)] * 8, 8, 1 / 8 * 2 / 7),
        # All sleep, and nobody has the lock.
        ([reading(0.1, blocked=9.9)] * 2, 10, 0.01 * 0.02),
        # One sleeps for so long that it cannot be for the lock.
        ([reading(30), reading(0.1, blocked=29.9, slices=0)], 30, 5 / 30 / 2),
        ([reading(0), reading(0)], 10, 0.0),
        ([reading(1)], 0, 0.0),
    ],
)
def test_the_share(
    readings: list[Reading], wall: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 0.005)

    assert lock_share(readings, round(MS * wall)) == pytest.approx(share, rel=1e-3)


def readings_of(call: Callable[[], None]) -> Reading:
    waits = LockWaits()
    with metered(waits) as is_mine, ThreadPoolExecutor(1) as threads:
        assert is_mine
        threads.submit(waits.of_replica(call)).result(timeout=60)
    (found,) = waits._readings
    return found


@measurable
@pytest.mark.parametrize("category", ["wait", "collective", "reduce"])
def test_what_is_waited_for_outside_of_python_does_not_count(category: str) -> None:
    def meet() -> None:
        with span(category, "outer"), span("wait", "inner"):
            time.sleep(0.2)
        with span("compute", "own"):
            pass

    start = time.perf_counter_ns()
    found = readings_of(meet)

    assert found.wall <= time.perf_counter_ns() - start - 200 * MS


@measurable
def test_a_thread_that_runs_is_not_blocked() -> None:
    def compute() -> None:
        end = time.thread_time_ns() + 20 * MS
        while time.thread_time_ns() < end:
            pass

    found = readings_of(compute)

    assert found.running >= 20 * MS
    assert found.wall >= found.running


@measurable
def test_one_run_at_a_time_is_measured_and_other_threads_do_not_count() -> None:
    def nested() -> None:
        with metered(LockWaits()) as is_mine:
            assert not is_mine
        other = threading.Thread(target=lambda: span("wait", "elsewhere").__enter__())
        other.start()
        other.join(timeout=60)

    assert readings_of(nested).slices >= 0


@measurable
def test_a_call_that_fails_is_left_out() -> None:
    waits = LockWaits()

    with pytest.raises(ValueError, match="on purpose"):
        waits.of_replica(lambda: int("on purpose"))()

    assert waits.share() == 0.0


def test_a_process_that_can_open_no_file_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.tracing.lock_waits._SCHEDULED", "/nowhere")
    waits = LockWaits()

    assert not can_measure()
    assert waits.of_replica(lambda: 7)() == 7
    assert waits.share() == 0.0
