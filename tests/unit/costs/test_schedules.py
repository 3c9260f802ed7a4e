"""Costs of schedules between the devices of one process."""

from __future__ import annotations

import pytest

from unisono.algorithms import Gather, Spread, one_device, two_level
from unisono.costs import Link, schedule_line
from unisono.costs.model import schedule_seconds
from unisono.devices import halves

LINK = Link(1e-5, 1e10, 2e-6)
MEMORY = Link(1e-6, 4e10, 0.0)
N = 1e8


@pytest.mark.parametrize("p", range(2, 10))
def test_all_goes_through_the_link_of_one_root(p: int) -> None:
    everywhere = range(p)
    schedule = one_device(p, destinations=everywhere)

    seconds = schedule_seconds(schedule, everywhere, LINK, MEMORY, N)

    travel = 2 * (LINK.latency + (p - 2) * LINK.overhead + (p - 1) * N / LINK.bandwidth)
    assert seconds == pytest.approx(travel + MEMORY.latency + (p + 1) * N / MEMORY.bandwidth)


def test_groups_work_at_the_same_time() -> None:
    halves_of_8 = schedule_line(two_level(halves(8)), range(8), LINK, MEMORY)
    star_of_8 = schedule_line(one_device(8, destinations=range(8)), range(8), LINK, MEMORY)

    # 3 inside, 1 between, and back: 8 transfers after each other, where the star has 14.
    assert halves_of_8.per_byte == pytest.approx(8 / LINK.bandwidth + 8 / MEMORY.bandwidth)
    assert star_of_8.per_byte == pytest.approx(14 / LINK.bandwidth + 9 / MEMORY.bandwidth)
    assert halves_of_8.latency > star_of_8.latency


@pytest.mark.parametrize("p", range(2, 10))
def test_in_one_memory_nothing_travels_and_each_value_is_read_and_written(p: int) -> None:
    schedule = one_device(p, destinations=range(p))

    seconds = schedule_seconds(schedule, ["host"] * p, LINK, MEMORY, N)

    assert seconds == pytest.approx(MEMORY.latency + 2 * p * N / MEMORY.bandwidth)


def test_moves_that_share_a_place_follow_each_other() -> None:
    moves = (Spread(0, (1,)), Spread(2, (3,)), Spread(1, (4,)))

    seconds = schedule_seconds(moves, range(5), LINK, MEMORY, N)

    assert seconds == pytest.approx(2 * (LINK.latency + N / LINK.bandwidth))
    assert schedule_seconds((), range(5), LINK, MEMORY, N) == 0
    assert schedule_seconds((Gather(0, ()),), [0], LINK, MEMORY, 0) == MEMORY.latency
