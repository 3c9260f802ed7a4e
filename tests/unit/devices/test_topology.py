import pytest
import torch

from unisono.devices import Device, Groups, cpu_slots, halves, linked_groups, near_groups, pretend

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


def test_gpus_are_grouped_by_the_links_that_torch_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", is_linked_on_dgx1)

    with pretend(gpus=tuple(torch.device("cuda", i) for i in range(8))):
        assert near_groups([Device("cuda", i) for i in range(8)]) == QUADS
        # Groups are positions in the list that was asked about, not device numbers.
        assert near_groups([Device("cuda", i) for i in (0, 4, 5, 2)]) == ((0, 1), (2,), (3,))


@pytest.mark.parametrize("are_linked", [True, False])
def test_links_that_say_nothing_leave_halves(
    monkeypatch: pytest.MonkeyPatch, are_linked: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: are_linked)

    with pretend(gpus=tuple(torch.device("cuda", i) for i in range(7))):
        assert near_groups([Device("cuda", i) for i in range(7)]) == ((0, 1, 2, 3), (4, 5, 6))


def test_slots_on_one_gpu_are_near_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    gpus = tuple(torch.device("cuda", i) for i in (0, 0, 1, 1, 1))

    with pretend(gpus=gpus):
        assert near_groups([Device("cuda", i) for i in range(5)]) == ((0, 1), (2, 3, 4))
