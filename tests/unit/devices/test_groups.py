from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from recorded_machines import on, recorded

from unisono.devices import (
    Device,
    Gpu,
    Groups,
    Link,
    Machine,
    Topology,
    as_recorded,
    cpu_slots,
    default_devices,
    halves,
    linked_groups,
    near_groups,
    pretend,
)

QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))


def is_linked_on_dgx1(a: int, b: int) -> bool:
    return a // 4 == b // 4 or abs(a - b) == 4


@pytest.mark.parametrize(
    ("num_devices", "groups"),
    [
        (0, ((),)),
        (1, ((0,),)),
        (2, ((0,), (1,))),
        (3, ((0, 1), (2,))),
        (4, ((0, 1), (2, 3))),
        (5, ((0, 1, 2, 3), (4,))),
        (6, ((0, 1, 2, 3), (4, 5))),
        (7, ((0, 1, 2, 3), (4, 5, 6))),
        (8, QUADS),
        (9, (tuple(range(8)), (8,))),
    ],
)
def test_halves_part_where_the_tree_does_and_leave_none_out(
    num_devices: int, groups: Groups
) -> None:
    assert halves(num_devices) == groups


def test_the_links_of_a_dgx1_make_two_quads() -> None:
    assert linked_groups(8, is_linked_on_dgx1) == QUADS


def test_devices_that_are_all_linked_make_one_group() -> None:
    assert linked_groups(5, lambda a, b: True) == ((0, 1, 2, 3, 4),)


def test_devices_without_links_make_a_group_each() -> None:
    assert linked_groups(3, lambda a, b: False) == ((0,), (1,), (2,))


def test_linked_pairs_make_pairs_and_an_odd_one_stays_alone() -> None:
    assert linked_groups(5, lambda a, b: a // 2 == b // 2) == ((0, 1), (2, 3), (4,))


def test_links_between_every_other_device_make_groups_that_interleave() -> None:
    assert linked_groups(6, lambda a, b: a % 2 == b % 2) == ((0, 2, 4), (1, 3, 5))


@pytest.mark.parametrize("num_devices", range(1, 10))
def test_cpu_slots_have_no_links_and_are_halved(num_devices: int) -> None:
    assert near_groups(cpu_slots(num_devices)) == halves(num_devices)


@pytest.mark.parametrize(
    ("machine", "groups"),
    [
        ("dgx_1", QUADS),
        # Every link is alike, so they part as the tree of the sum does.
        ("dgx_h100", QUADS),
        ("pcie_4", ((0, 1), (2, 3))),
        ("one_gpu", ((0,),)),
        ("no_gpu", ((0,),)),
    ],
)
def test_recorded_machines_part_at_their_farthest_links(machine: str, groups: Groups) -> None:
    with on(machine):
        assert near_groups(default_devices()) == groups


def test_groups_are_positions_in_the_list_and_not_device_numbers() -> None:
    with on("dgx_1"):
        assert near_groups(gpus(0, 4, 5, 2)) == ((0, 1), (2,), (3,))
        assert near_groups(gpus(7, 3, 6, 2)) == ((0, 1), (2, 3))
    with on("pcie_4"):
        assert near_groups(gpus(3, 0, 1)) == ((0,), (1, 2))


def test_two_sockets_make_two_groups_whatever_is_inside_them() -> None:
    # Pairs on a bridge, two bridges per socket.
    with joined(
        8, lambda a, b: "PIX" if a // 2 == b // 2 else "PHB" if a // 4 == b // 4 else "SYS"
    ):
        assert near_groups(gpus(*range(8))) == QUADS


def test_one_socket_parts_by_its_nvlinks() -> None:
    with joined(4, lambda a, b: "NV4" if a // 2 == b // 2 else "NODE"):
        assert near_groups(gpus(*range(4))) == ((0, 1), (2, 3))


@pytest.mark.parametrize("link", ["NVS18", "PIX", "SYS*", "?", "?*"])
def test_links_that_are_all_alike_leave_halves(link: str) -> None:
    with joined(7, lambda a, b: link):
        assert near_groups(gpus(*range(7))) == ((0, 1, 2, 3), (4, 5, 6))


def test_peer_access_parts_gpus_whose_links_are_not_known() -> None:
    with joined(6, lambda a, b: "?" if a % 2 == b % 2 else "?*"):
        assert near_groups(gpus(*range(6))) == ((0, 2, 4), (1, 3, 5))


def test_slots_on_one_gpu_are_nearest() -> None:
    slots = tuple(torch.device("cuda", i) for i in (0, 0, 1, 1, 1))

    with joined(2, lambda a, b: "NV2"), pretend(gpus=slots):
        assert near_groups(gpus(*range(5))) == ((0, 1), (2, 3, 4))


def test_the_host_is_a_group_of_its_own() -> None:
    with on("dgx_h100"):
        assert near_groups([*gpus(0, 1), *cpu_slots(2)]) == ((0, 1), (2, 3))


def test_gpus_that_nobody_knows_are_halved() -> None:
    with pretend(
        gpus=tuple(torch.device("cuda", i) for i in range(3)), recorded=recorded("no_gpu")
    ):
        assert near_groups(gpus(0, 1, 2)) == ((0, 1), (2,))


def gpus(*indices: int) -> list[Device]:
    return [Device("cuda", index) for index in indices]


def joined(num_gpus: int, link: Callable[[int, int], str]) -> AbstractContextManager[Machine]:
    """Within the block there are that many GPUs, and `link` says what joins two of them."""

    def links(a: int) -> tuple[Link, ...]:
        return tuple(Link.parse("X" if a == b else link(a, b)) for b in range(num_gpus))

    cards = tuple(Gpu(f"card {a}", 1 << 30, links(a)) for a in range(num_gpus))
    return as_recorded(Topology(cards, "the test"))
