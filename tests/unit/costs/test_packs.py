"""The size of packs, and the sizes at which one algorithm overtakes another."""

from __future__ import annotations

import pytest

from unisono.costs import (
    BYTES_PER_PACK,
    USUAL_LINK,
    Cluster,
    Line,
    Link,
    best_bytes_per_pack,
    fastest_flat,
    first_bytes_for_parts,
)
from unisono_tools.pricing import phases_of, seconds_of

FAST, SLOW = Link(1e-6, 1e10), Link(5e-5, 1e9)


@pytest.mark.parametrize("total", [10**7, 10**8, 10**9])
@pytest.mark.parametrize("cost", [Line(1e-5, 1e-9), Line(1e-4, 2e-10)])
def test_no_other_size_costs_less(cost: Line, total: int) -> None:
    def seconds(size: float) -> float:
        return total / size * cost.latency + size * cost.per_byte

    best = best_bytes_per_pack(cost, total)

    assert all(seconds(best) <= seconds(best * factor) for factor in (0.5, 0.9, 1.1, 2))


def test_packs_are_never_tiny_and_those_of_unknown_links_as_before() -> None:
    assert best_bytes_per_pack(Line(0.0, 1e-9), 10**9) == 64 << 10
    assert best_bytes_per_pack(None, 10**9) == BYTES_PER_PACK
    assert best_bytes_per_pack(Line(1e-6, 0.0), 10**9) == BYTES_PER_PACK


def test_one_step_is_fastest_up_to_what_a_step_carries() -> None:
    link = Link(1e-5, 1e9, 0.0)
    # It sends 3 * 2 / 4 = 1.5 times the tensor more, and a step carries 10 KB.
    assert fastest_flat(4, 4_000, link) == "one step"
    assert fastest_flat(4, 9_000, link) == "exchange"


def test_many_ranks_send_small_tensors_in_few_messages() -> None:
    assert fastest_flat(8, 64, USUAL_LINK) == "one step"
    assert fastest_flat(32, 64, USUAL_LINK) == "doubling"
    assert fastest_flat(32, 1 << 24, USUAL_LINK) == "exchange"


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (2, 4), (8, 8)])
def test_parts_overtake_leaders_where_both_take_as_long(hosts: int, ranks: int) -> None:
    cluster = Cluster(hosts, ranks, FAST, SLOW, 1e10)
    first = first_bytes_for_parts(cluster)

    def gain(num_bytes: int) -> float:
        leaders, parts = (phases_of(name, hosts, ranks) for name in ("leaders", "parts"))
        return seconds_of(leaders, cluster, num_bytes) - seconds_of(parts, cluster, num_bytes)

    assert gain(first + 1000) > 0
    assert first == 0 or gain(first - 1000) < 0
