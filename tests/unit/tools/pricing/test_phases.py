"""The formulas by which Unisono chooses an algorithm give what the rounds of the algorithm cost."""

from __future__ import annotations

import pytest

from unisono.costs import Cluster, Link, by_host, cost_line
from unisono.costs.model import seconds
from unisono_tools.pricing import line_of, phases_of, seconds_of

FAST, SLOW = Link(3e-6, 5e9, 7e-7), Link(60e-6, 1e8, 9e-6)
SIZES = (0, 1, 3_000, 10**7)


@pytest.mark.parametrize("links", [(FAST, SLOW), (SLOW, FAST)])
@pytest.mark.parametrize(("hosts", "ranks"), [(1, 1), (1, 5), (2, 2), (3, 4), (5, 3), (16, 8)])
def test_a_formula_is_the_sum_of_its_rounds(
    hosts: int, ranks: int, links: tuple[Link, Link]
) -> None:
    cluster = Cluster(hosts, ranks, *links, 2e10)
    for name in ("one step", "exchange", *by_host(hosts, ranks)):
        phases = phases_of(name, hosts, ranks)
        for size in SIZES:
            assert seconds(name, cluster, size) == pytest.approx(seconds_of(phases, cluster, size))
        assert cost_line(name, cluster) == pytest.approx(line_of(phases, cluster))


@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 13, 32, 100])
def test_doubling_between_hosts_of_one_rank(hosts: int) -> None:
    cluster = Cluster(hosts, 1, FAST, SLOW, 2e10)
    phases = phases_of("doubling", hosts, 1)
    for size in SIZES:
        assert seconds("doubling", cluster, size) == pytest.approx(
            seconds_of(phases, cluster, size)
        )
