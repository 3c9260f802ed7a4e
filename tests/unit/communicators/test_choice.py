"""What is chosen for ranks on hosts, with and without measured links."""

from __future__ import annotations

import pytest

from unisono.communicators import Carrier
from unisono.communicators.choice import PARTS_BYTES, Choice, choose
from unisono.communicators.hosts import Layout
from unisono.costs import STEP_BYTES, Link, Tuning, best_bytes_per_pack
from unisono.options import CommunicationImplementation

AUTO, RING = CommunicationImplementation.AUTO, CommunicationImplementation.RING
FAST, SLOW = Link(1e-6, 2e10), Link(1e-4, 1e9)
ONE_HOST = Layout(((0, 1, 2, 3),))
TWO_HOSTS = Layout(((0, 1), (2, 3)))
THREES = Layout(((0, 1, 2), (3, 4, 5)))
UNEVEN = Layout(((0, 1), (2,)))
APART = Layout(((0,), (1,), (2,)))


def tuned(
    inside: Link | None = FAST, between: Link | None = SLOW, loopback: Link | None = FAST
) -> Tuning:
    return Tuning(FAST, FAST, inside, loopback, between, 2e10, {}, "2026-11-15", "0.1.0")


def chosen(
    layout: Layout,
    tuning: Tuning | None,
    implementation: CommunicationImplementation = AUTO,
    *,
    has_native_core: bool = True,
) -> Choice:
    return choose(
        layout, has_native_core=has_native_core, implementation=implementation, tuning=tuning
    )


CARRIERS = {
    ONE_HOST: Carrier.SHARED_MEMORY,
    TWO_HOSTS: Carrier.HIERARCHICAL,
    THREES: Carrier.HIERARCHICAL,
    UNEVEN: Carrier.TCP,
    APART: Carrier.TCP,
}


@pytest.mark.parametrize(("layout", "carrier"), CARRIERS.items())
def test_untuned_ranks_by_host_decide(layout: Layout, carrier: Carrier) -> None:
    choice = chosen(layout, None)

    assert choice == Choice(carrier, choice.why)
    assert (choice.parts_bytes, choice.step_bytes) == (PARTS_BYTES, STEP_BYTES)
    assert chosen(layout, None, RING).carrier is Carrier.GLOO
    assert chosen(layout, None, has_native_core=False).carrier is Carrier.TCP


@pytest.mark.parametrize("layout", CARRIERS)
def test_links_that_were_not_measured_change_nothing(layout: Layout) -> None:
    nothing = tuned(inside=None, between=None, loopback=None)

    for implementation in (AUTO, RING):
        assert chosen(layout, nothing, implementation) == chosen(layout, None, implementation)


def test_a_slow_link_between_hosts_is_used_by_host() -> None:
    assert chosen(TWO_HOSTS, tuned()).carrier is Carrier.HIERARCHICAL


def test_a_slow_way_inside_hosts_makes_all_ranks_alike() -> None:
    choice = chosen(TWO_HOSTS, tuned(inside=SLOW, between=FAST))

    assert choice.carrier is Carrier.TCP
    assert "0, 1 | 2, 3, and for 4 MiB the links as tuned promise" in choice.why


def test_hosts_of_three_bring_all_terms_which_is_dear() -> None:
    # Each host would send three times as much as the exchange of all ranks does.
    assert chosen(THREES, tuned()).carrier is Carrier.TCP


def test_thresholds_are_those_of_the_links() -> None:
    slow, slower = (chosen(TWO_HOSTS, tuned(between=Link(a, 1e9))) for a in (1e-4, 1e-3))

    assert (slow.step_bytes, slower.step_bytes) == (100_000, 1_000_000)
    assert slow.parts_bytes != PARTS_BYTES
    assert chosen(ONE_HOST, tuned(loopback=SLOW), RING).step_bytes == 100_000


@pytest.mark.parametrize("layout", [ONE_HOST, TWO_HOSTS, APART])
def test_what_is_tuned_has_a_cost_and_with_it_a_size_of_packs(layout: Layout) -> None:
    quick = chosen(layout, tuned())
    late = chosen(layout, tuned(Link(1e-3, 2e10), Link(1e-2, 1e9)))

    assert quick.cost is not None
    assert late.cost is not None
    assert best_bytes_per_pack(quick.cost, 10**8) < best_bytes_per_pack(late.cost, 10**8)
