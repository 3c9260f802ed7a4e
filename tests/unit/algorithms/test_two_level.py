import pytest

from unisono.algorithms import (
    Gather,
    Schedule,
    Spread,
    make_plan,
    num_steps,
    num_transfers,
    two_level,
)
from unisono.devices import Groups, halves

QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))


def test_members_go_to_their_root_and_roots_to_the_first() -> None:
    assert two_level(QUADS) == (
        Gather(0, (1, 2, 3)),
        Gather(4, (5, 6, 7)),
        Gather(0, (4,)),
        Spread(0, (4,)),
        Spread(0, (1, 2, 3)),
        Spread(4, (5, 6, 7)),
    )


def test_the_roots_move_on_with_each_turn() -> None:
    roots = [roots_of(two_level(QUADS, turn=turn)) for turn in range(8)]

    assert roots == [(0, 4), (1, 5), (2, 6), (3, 7), (4, 0), (5, 1), (6, 2), (7, 3)]


@pytest.mark.parametrize("num_devices", range(2, 10))
def test_every_device_is_first_once_in_as_many_turns(num_devices: int) -> None:
    groups = halves(num_devices)

    firsts = [roots_of(two_level(groups, turn=turn))[0] for turn in range(2 * num_devices)]

    assert firsts == [*range(num_devices)] * 2


@pytest.mark.parametrize("num_devices", range(1, 10))
def test_transfers_and_steps(num_devices: int) -> None:
    for turn in range(num_devices):
        schedule = two_level(halves(num_devices), turn=turn)

        assert num_transfers(schedule) == 2 * (num_devices - 1)
        assert num_steps(schedule) == {1: 0, 2: 2}.get(num_devices, 4)


@pytest.mark.parametrize("num_devices", range(1, 10))
def test_halves_are_whole_partial_sums_so_each_crosses_once(num_devices: int) -> None:
    everywhere = tuple(range(num_devices))

    for turn in range(num_devices):
        schedule = two_level(halves(num_devices), turn=turn)
        plan = make_plan(schedule, num_devices, everywhere, everywhere)

        assert plan.num_copies == 2 * (num_devices - 1)


@pytest.mark.parametrize(
    ("groups", "num_copies"),
    [
        # 1 and 3 are no partial sum of the tree, so both cross: one more than 2 (4 - 1).
        (((0, 2), (1, 3)), 7),
        # 3 and 4 + 5 cross: one more than 2 (6 - 1).
        (((0, 1, 2), (3, 4, 5)), 11),
        (((0, 1), (2, 3), (4, 5)), 10),
        (((0, 1, 2, 3, 4),), 8),
    ],
)
def test_groups_that_are_no_partial_sums_send_their_terms_apart(
    groups: Groups, num_copies: int
) -> None:
    num_devices = sum(map(len, groups))
    everywhere = tuple(range(num_devices))

    plan = make_plan(two_level(groups), num_devices, everywhere, everywhere)

    assert plan.num_copies == num_copies


def roots_of(schedule: Schedule) -> tuple[int, int]:
    """The first root and the other one, between which the result goes before all else."""
    spread = next(move for move in schedule if isinstance(move, Spread))
    return spread.root, spread.members[0]
