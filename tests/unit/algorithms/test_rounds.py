"""Algorithms between ranks: everybody hears of everybody, and what that takes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from tables import every

from unisono.algorithms.rounds import Rounds, doubling, exchange, one_step
from unisono_tools.pricing import Phase, busiest_share, num_steps
from unisono_tools.pricing.halving import halving
from unisono_tools.pricing.inside import all_gather, gather, spread
from unisono_tools.pricing.ring import ring
from unisono_tools.pricing.tree import tree

ALL_REDUCES = [doubling, exchange, halving, one_step, ring, tree]
each_all_reduce = pytest.mark.parametrize("algorithm", ALL_REDUCES)


def heard(rounds: Rounds) -> list[set[int]]:
    """The ranks that each rank has heard of in the end, directly or through others."""
    known = [{rank} for rank in range(rounds.num_ranks)]
    for one in rounds.rounds:
        for _ in range(one.times):
            before = [set(own) for own in known]
            for send in one.sends:
                for sender in send.senders:
                    for offset in send.offsets:
                        known[(sender + offset) % rounds.num_ranks] |= before[sender]
    return known


@each_all_reduce
@every("num_ranks", [*range(1, 18), 31])
def test_everybody_hears_of_everybody(algorithm: Callable[[int], Rounds], num_ranks: int) -> None:
    assert heard(algorithm(num_ranks)) == [set(range(num_ranks))] * num_ranks


@each_all_reduce
def test_one_rank_sends_nothing(algorithm: Callable[[int], Rounds]) -> None:
    assert cost(algorithm(1)) == (0, 0)


@pytest.mark.parametrize("num_ranks", range(2, 10))
def test_the_parts_of_an_all_reduce_reach_whom_they_should(num_ranks: int) -> None:
    assert all(0 in own for own in heard(spread(num_ranks)))
    assert heard(gather(num_ranks))[0] == set(range(num_ranks))
    assert heard(all_gather(num_ranks)) == [set(range(num_ranks))] * num_ranks


def cost(rounds: Rounds) -> tuple[object, object]:
    """The steps, and what the busiest rank of each round sends, if each rank has a host."""
    phases = (Phase(rounds),)
    return num_steps(phases), pytest.approx(busiest_share(phases, 1, between=True))


@pytest.mark.parametrize("num_ranks", range(2, 17))
def test_steps_and_bytes(num_ranks: int) -> None:
    levels = math.ceil(math.log2(num_ranks))
    least = 2 * (num_ranks - 1) / num_ranks

    assert cost(ring(num_ranks)) == (2 * (num_ranks - 1), least)
    assert cost(exchange(num_ranks)) == (2, least)
    assert cost(one_step(num_ranks)) == (1, num_ranks - 1)
    assert cost(tree(num_ranks)) == (2 * levels, 2 * levels)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_steps_and_bytes_of_pairs_of_a_power_of_two(num_ranks: int) -> None:
    levels = num_ranks.bit_length() - 1

    assert cost(doubling(num_ranks)) == (levels, levels)
    assert cost(halving(num_ranks)) == (2 * levels, 2 * (num_ranks - 1) / num_ranks)
    assert num_steps([Phase(doubling(num_ranks + 1))]) == levels + 1
    # A rank without a pair takes a step before and a step after.
    assert num_steps([Phase(halving(num_ranks + 1))]) == 2 * levels + 2
