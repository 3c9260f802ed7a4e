"""Traces of workers with clocks of their own are put on one clock."""

from __future__ import annotations

import random

import pytest

from unisono.tracing import Event, Thread, WorkerTrace, align

SECOND = 1_000_000_000
MICROSECOND = 1_000


def worker(rank: int, events: list[Event], clock: str) -> WorkerTrace:
    return WorkerTrace(rank, 2, "host", clock, 0, [Thread("MainThread", events)])


def collectives(
    arrivals: list[list[int]], offset: int, drift: float, seed: int
) -> tuple[WorkerTrace, WorkerTrace]:
    """Two workers that arrive at collectives at some true times, and end after the later one."""
    noise = random.Random(seed)

    def read(rank: int, true_time: int) -> int:
        return true_time if rank == 0 else true_time + offset + round(drift * true_time)

    events: list[list[Event]] = [[], []]
    for number, comes in enumerate(arrivals):
        for rank, start in enumerate(comes):
            end = max(comes) + noise.randrange(20, 120) * MICROSECOND
            told = {"group": 1, "number": number}
            times = read(rank, start), read(rank, end)
            events[rank].append(Event(*times, "collective", "all_reduce", told))
    return worker(0, events[0], "here"), worker(1, events[1], "there")


@pytest.mark.parametrize("late", [0, 50_000 * MICROSECOND], ids=["in step", "always late"])
@pytest.mark.parametrize(
    ("offset", "drift"),
    [(0, 0.0), (7 * SECOND, 0.0), (-3 * SECOND, 0.0), (5 * SECOND, 1e-4), (5 * SECOND, -2e-4)],
)
def test_the_offset_and_the_drift_of_a_clock_are_taken_out(
    offset: int, drift: float, late: int
) -> None:
    # A worker that always comes last must not be taken for one whose clock is ahead.
    arrivals = [[n * SECOND // 10, n * SECOND // 10 + late] for n in range(200)]
    first, second = collectives(arrivals, offset, drift, seed=1)

    aligned = align([first, second])[1]

    for event, (_, start) in zip(aligned.events(), arrivals, strict=True):
        assert abs(event.start - start) < 200 * MICROSECOND


def test_workers_that_read_one_clock_are_left_as_they_are() -> None:
    first, second = collectives([[0, SECOND]], offset=0, drift=0.0, seed=1)
    same = worker(1, list(second.events()), "here")

    assert align([first, same]) == [first, same]


def test_a_worker_that_met_nobody_keeps_its_times() -> None:
    first, _ = collectives([[0, 0]], offset=0, drift=0.0, seed=1)
    alone = worker(1, [Event(5, 9, "step", "run", {"step": 1})], "there")

    assert align([first, alone])[1] == alone


def test_a_collective_that_failed_tells_nothing_of_the_clocks() -> None:
    arrivals = [[n * SECOND // 10] * 2 for n in range(5)]
    first, second = collectives(arrivals, offset=SECOND, drift=0.0, seed=1)
    failed = Event(
        0, 90 * SECOND, "collective", "all_reduce", {"group": 1, "number": 0, "error": "E"}
    )
    changed = worker(1, [failed, *list(second.events())[1:]], "there")

    starts = [event.start for event in align([first, changed])[1].events()]

    assert abs(starts[1] - arrivals[1][1]) < 200 * MICROSECOND
