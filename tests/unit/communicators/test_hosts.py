"""Which ranks are on one host, and which address leads to another."""

import pytest

from unisono.communicators.hosts import Layout, address_towards, host_identity, reachable


def test_a_process_is_on_its_own_host() -> None:
    assert host_identity() == host_identity()
    assert "net:[" in host_identity()


@pytest.mark.parametrize(
    ("identities", "hosts", "is_regular"),
    [
        ("a", ((0,),), True),
        ("aabb", ((0, 1), (2, 3)), True),
        ("abc", ((0,), (1,), (2,)), True),
        ("abab", ((0, 2), (1, 3)), False),
        ("aab", ((0, 1), (2,)), False),
        ("abba", ((0, 3), (1, 2)), False),
    ],
)
def test_ranks_are_grouped_by_host(
    identities: str, hosts: tuple[tuple[int, ...], ...], is_regular: bool
) -> None:
    layout = Layout.of(list(identities))

    assert layout.hosts == hosts
    assert layout.is_regular is is_regular
    assert layout.size == len(identities)
    for rank in range(layout.size):
        host, position = layout.place(rank)
        assert hosts[host][position] == rank


def test_the_way_to_this_host_is_the_loopback() -> None:
    assert address_towards(("localhost", 1)) in ("127.0.0.1", "::1")
    assert address_towards(None) == "127.0.0.1"


def test_the_loopback_serves_where_all_ranks_use_it_and_a_name_is_left_alone() -> None:
    assert reachable("127.0.0.1", ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    assert reachable("10.0.0.2", ["127.0.0.1", "10.0.0.2"]) == "10.0.0.2"
    assert reachable("worker-1", ["127.0.0.1", "worker-1"]) == "worker-1"
