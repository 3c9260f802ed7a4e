"""What is chosen for ranks on hosts, with and without measured links."""

from __future__ import annotations

import pytest

from unisono.communicators.choice import PARTS_BYTES, Carrier, Choice, Engine, choose
from unisono.communicators.hosts import Layout
from unisono.costs import USUAL_LINK, Link, Tuning, best_bytes_per_pack
from unisono.options import CommunicationImplementation

AUTO, RING = CommunicationImplementation.AUTO, CommunicationImplementation.RING
NCCL, TCP = CommunicationImplementation.NCCL, CommunicationImplementation.TCP
FAST, SLOW = Link(1e-6, 2e10), Link(1e-4, 1e9)
ONE_HOST = Layout(((0, 1, 2, 3),))
TWO_HOSTS = Layout(((0, 1), (2, 3)))
THREES = Layout(((0, 1, 2), (3, 4, 5)))
UNEVEN = Layout(((0, 1), (2,)))
APART = Layout(((0,), (1,), (2,)))


def tuned(
    inside: Link | None = FAST,
    between: Link | None = SLOW,
    loopback: Link | None = FAST,
    tcp: Link | None = None,
) -> Tuning:
    return Tuning(FAST, FAST, inside, loopback, between, 2e10, {}, "2026-11-15", "0.1.0", tcp)


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
    UNEVEN: Carrier.FLAT,
    APART: Carrier.FLAT,
}
UNLIKE = ", which differ between hosts or are not in order"


@pytest.mark.parametrize(
    ("hosts", "carrier", "reason"),
    [
        ("a", Carrier.NOTHING, "one rank has nothing to exchange"),
        ("aaa", Carrier.SHARED_MEMORY, "all ranks are on one host"),
        ("aabb", Carrier.HIERARCHICAL, "ranks by host are 0, 1 | 2, 3"),
        ("aaabbb", Carrier.HIERARCHICAL, "ranks by host are 0, 1, 2 | 3, 4, 5"),
        ("ab", Carrier.FLAT, "no two ranks share a host"),
        ("aab", Carrier.FLAT, f"0, 1 | 2{UNLIKE}"),
        ("abab", Carrier.FLAT, f"0, 2 | 1, 3{UNLIKE}"),
    ],
)
def test_where_the_ranks_are_decides(hosts: str, carrier: Carrier, reason: str) -> None:
    layout = Layout.of(hosts)

    for implementation in (AUTO, NCCL):
        choice = chosen(layout, None, implementation)
        assert (choice.carrier, choice.engine) == (carrier, Engine.GLOO)
        assert choice.why.endswith(reason)
    if layout.size > 1:
        asked = chosen(layout, None, TCP)
        assert (asked.carrier, asked.engine) == (
            carrier,
            Engine.GLOO if carrier is Carrier.SHARED_MEMORY else Engine.TCP,
        )


def test_tcp_is_taken_where_it_is_encrypted_or_measured_to_be_faster() -> None:
    choice = choose(TWO_HOSTS, has_native_core=True, is_encrypted=True)
    assert (choice.engine, str(choice)) == (
        Engine.TCP,
        "shared memory inside a host, TCP between",
    )
    assert "encrypted" in choice.why

    assert chosen(TWO_HOSTS, tuned(tcp=FAST)).engine is Engine.TCP
    assert chosen(TWO_HOSTS, tuned(tcp=Link(1e-4, 9e8))).engine is Engine.GLOO


def test_mpi_is_taken_where_it_started_all_ranks_unless_something_else_is_asked_for() -> None:
    def engine(
        implementation: CommunicationImplementation, *, is_encrypted: bool = False
    ) -> Engine:
        return choose(
            APART,
            has_native_core=True,
            implementation=implementation,
            is_encrypted=is_encrypted,
            has_mpi=True,
        ).engine

    assert [engine(AUTO), engine(NCCL), engine(RING), engine(TCP)] == [
        Engine.MPI,
        Engine.MPI,
        Engine.GLOO,
        Engine.TCP,
    ]
    assert engine(AUTO, is_encrypted=True) is Engine.TCP


@pytest.mark.parametrize(("layout", "carrier"), CARRIERS.items())
def test_untuned_ranks_by_host_decide(layout: Layout, carrier: Carrier) -> None:
    choice = chosen(layout, None)

    assert choice == Choice(carrier, choice.why)
    assert (choice.parts_bytes, choice.link) == (PARTS_BYTES, USUAL_LINK)
    assert chosen(layout, None, RING) == Choice(Carrier.FLAT, "asked for")
    assert chosen(layout, None, has_native_core=False).carrier is Carrier.FLAT


@pytest.mark.parametrize("layout", CARRIERS)
def test_links_that_were_not_measured_change_nothing(layout: Layout) -> None:
    nothing = tuned(inside=None, between=None, loopback=None)

    for implementation in (AUTO, RING):
        assert chosen(layout, nothing, implementation) == chosen(layout, None, implementation)


def test_a_slow_link_between_hosts_is_used_by_host() -> None:
    assert chosen(TWO_HOSTS, tuned()).carrier is Carrier.HIERARCHICAL


def test_a_slow_way_inside_hosts_makes_all_ranks_alike() -> None:
    choice = chosen(TWO_HOSTS, tuned(inside=SLOW, between=FAST))

    assert choice.carrier is Carrier.FLAT
    assert "0, 1 | 2, 3, and for 4 MiB the links as tuned promise" in choice.why


def test_hosts_of_three_bring_all_terms_which_is_dear() -> None:
    # Each host would send three times as much as the exchange of all ranks does.
    assert chosen(THREES, tuned()).carrier is Carrier.FLAT


def test_thresholds_are_those_of_the_links() -> None:
    slow, slower = (chosen(TWO_HOSTS, tuned(between=Link(a, 1e9))) for a in (1e-4, 1e-3))

    assert (slow.link, slower.link) == (Link(1e-4, 1e9), Link(1e-3, 1e9))
    assert slow.parts_bytes != PARTS_BYTES
    assert chosen(ONE_HOST, tuned(loopback=SLOW), RING).link == SLOW


@pytest.mark.parametrize("layout", [ONE_HOST, TWO_HOSTS, APART])
def test_what_is_tuned_has_a_cost_and_with_it_a_size_of_packs(layout: Layout) -> None:
    quick = chosen(layout, tuned())
    late = chosen(layout, tuned(Link(1e-3, 2e10), Link(1e-2, 1e9)))

    assert quick.cost is not None
    assert late.cost is not None
    assert best_bytes_per_pack(quick.cost, 10**8) < best_bytes_per_pack(late.cost, 10**8)
