"""Costs of rounds against closed forms, and loads against a count of every message."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from unisono.costs import Cluster, Link
from unisono.errors import UnsupportedError
from unisono_tools.pricing import (
    Phase,
    algorithms_for,
    busiest_share,
    line_of,
    num_steps,
    phases_of,
    seconds_of,
)
from unisono_tools.pricing.rounds import loads_of

A, B, E, G = 3e-6, 5e9, 7e-7, 2e10
LINK = Link(A, B, E)
SLOW = Link(20 * A, B / 50, E)
N = 1e7


def one_host(num_ranks: int) -> Cluster:
    return Cluster(1, num_ranks, LINK, SLOW, G)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 16])
def test_one_host_costs_the_closed_forms(p: int) -> None:
    levels = math.ceil(math.log2(p))
    part = (p - 1) / p
    expected = {
        "ring": 2 * (p - 1) * A + 2 * part * N / B + 3 * part * N / G,
        "exchange": 2 * (A + (p - 2) * E) + 2 * part * N / B + (p + 1) / p * N / G,
        "one step": A + (p - 2) * E + (p - 1) * N / B + (p + 1) * N / G,
        "tree": 2 * levels * (A + N / B) + 3 * levels * N / G,
    }
    if p == 1 << levels:
        expected["doubling"] = levels * (A + N / B + 3 * N / G)
        expected["halving"] = 2 * levels * A + 2 * part * N / B + 3 * part * N / G

    found = {name: seconds_of(phases_of(name, 1, p), one_host(p), N) for name in expected}

    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", algorithms_for(1, 1))
def test_one_rank_costs_nothing(name: str) -> None:
    assert seconds_of(phases_of(name, 1, 1), one_host(1), N) == 0


@pytest.mark.parametrize(
    ("hosts", "ranks"), [(2, 1), (1, 5), (2, 2), (3, 2), (2, 3), (3, 5), (4, 4)]
)
def test_loads_are_those_of_the_busiest_rank_and_host(hosts: int, ranks: int) -> None:
    for name in algorithms_for(hosts, ranks):
        phases = phases_of(name, hosts, ranks)
        counted = [load for phase in phases for load in count_loads(phase, hosts, ranks)]
        found = [tuple(load[:4]) for load in loads_of(phases, ranks)]

        assert found == [pytest.approx(load) for load in counted], name


def count_loads(phase: Phase, hosts: int, ranks: int) -> list[tuple[float, ...]]:
    """What the busiest links carry, message by message, with every group of ranks written out."""
    size, loads = phase.rounds.num_ranks, []
    num_groups = hosts if phase.stride == 1 else phase.groups
    starts = [group * (size if phase.stride == 1 else 1) for group in range(num_groups)]
    if size == hosts * ranks:
        starts = [0]
    for one in phase.rounds.rounds:
        messages: Counter[tuple[str, str, int]] = Counter()
        carried: Counter[tuple[str, str, int]] = Counter()
        for start in starts:
            for send in one.sends:
                for sender in send.senders:
                    for offset in send.offsets:
                        source = start + sender * phase.stride
                        target = start + (sender + offset) % size * phase.stride
                        crosses = source // ranks != target // ranks
                        kind = "between" if crosses else "inside"
                        for way, rank in (("out", source), ("in", target)):
                            messages[kind, way, rank] += 1
                            link = rank // ranks if crosses else rank
                            carried[kind, way, link] += send.share * phase.share  # type: ignore[assignment]
        loads.append(
            tuple(
                float(max((n for key, n in table.items() if key[0] == kind), default=0))
                for kind in ("inside", "between")
                for table in (messages, carried)
            )
        )
    return loads


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (4, 8), (512, 8)])
def test_what_leaves_a_host(hosts: int, ranks: int) -> None:
    size = hosts * ranks
    left = {
        name: busiest_share(phases_of(name, hosts, ranks), ranks, between=True)
        for name in algorithms_for(hosts, ranks)
    }

    # A ring leaves a host at one rank only; an exchange of all leaves it from every rank.
    assert left["ring"] == pytest.approx(2 * (size - 1) / size)
    assert left["exchange"] == pytest.approx(2 * ranks * (size - ranks) / size)
    assert left["leaders"] == left["parts"] == pytest.approx(2 * (hosts - 1) / hosts)
    assert left["one step"] == pytest.approx(ranks * (size - ranks))


def test_hosts_pay_for_their_slow_link() -> None:
    cluster = Cluster(4, 2, LINK, SLOW, G)

    parts = seconds_of(phases_of("parts", 4, 2), cluster, N)
    inside = 2 * A + N / B + 1.5 * N / G + A + N / 2 / B
    between = 2 * (SLOW.latency + 2 * E) + 2 * 3 / 4 * N / SLOW.bandwidth + 5 / 4 * N / 2 / G
    assert parts == pytest.approx(inside + between)


def test_a_line_has_the_latency_and_the_slope() -> None:
    line = line_of(phases_of("ring", 1, 4), one_host(4))

    assert line.latency == pytest.approx(6 * A)
    assert line.seconds(N) == pytest.approx(seconds_of(phases_of("ring", 1, 4), one_host(4), N))
    assert num_steps(phases_of("ring", 1, 4)) == 6


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'ring'.*'parts'.*got 'rnig'"):
        phases_of("rnig", 2, 2)
