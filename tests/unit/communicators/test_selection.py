import pytest

from unisono.communicators import Carrier, Layout, choose_carrier
from unisono.options import CommunicationImplementation

NCCL, RING = CommunicationImplementation.NCCL, CommunicationImplementation.RING
UNEVEN = ", which is not as many on each, one host after the other"


@pytest.mark.parametrize(
    ("hosts", "carrier", "reason"),
    [
        ("a", Carrier.NOTHING, "one rank has nobody to talk to"),
        ("aaa", Carrier.SHARED_MEMORY, "all ranks are on one host"),
        ("aabb", Carrier.HIERARCHICAL, "ranks by host are 0, 1 | 2, 3"),
        ("aaabbb", Carrier.HIERARCHICAL, "ranks by host are 0, 1, 2 | 3, 4, 5"),
        ("ab", Carrier.TCP, "no two ranks share a host"),
        ("aab", Carrier.TCP, f"0, 1 | 2{UNEVEN}"),
        (
            "abab",
            Carrier.TCP,
            f"0, 2 | 1, 3{UNEVEN}",
        ),
    ],
)
def test_where_the_ranks_are_decides(hosts: str, carrier: Carrier, reason: str) -> None:
    layout = Layout.of(hosts)

    chosen = choose_carrier(layout, has_native_core=True)

    assert chosen.carrier is carrier
    assert chosen.reason.endswith(reason)
    assert choose_carrier(layout, has_native_core=True, implementation=NCCL).carrier is carrier


@pytest.mark.parametrize("hosts", ["aaa", "aabb", "aab"])
def test_gloo_is_what_is_left_or_asked_for(hosts: str) -> None:
    layout = Layout.of(hosts)

    without = choose_carrier(layout, has_native_core=False)
    asked = choose_carrier(layout, has_native_core=True, implementation=RING)

    assert without == (Carrier.TCP, "not every rank has a native core")
    assert asked == (Carrier.GLOO, "asked for")
