from collections.abc import Hashable

import pytest

from unisono.algorithms import (
    Combine,
    Copy,
    Gather,
    Plan,
    Schedule,
    Spread,
    make_plan,
    one_device,
    two_level,
)
from unisono.devices import halves


def all_reduce_plan(schedule: Schedule, memories: tuple[Hashable, ...]) -> Plan:
    return make_plan(schedule, len(memories), memories, tuple(range(len(memories))))


@pytest.mark.parametrize("num_replicas", range(1, 10))
def test_inside_one_memory_a_schedule_is_a_single_sum(num_replicas: int) -> None:
    everywhere = tuple(range(num_replicas))
    outputs = tuple(range(num_replicas, 2 * num_replicas))
    memories = ("host",) * num_replicas

    for schedule in (
        one_device(num_replicas, destinations=everywhere),
        two_level(halves(num_replicas)),
        two_level(halves(num_replicas), turn=num_replicas - 1),
    ):
        plan = all_reduce_plan(schedule, memories)

        assert plan.steps == (Combine(everywhere, outputs, is_result=True, is_whole=True),)
        assert plan.outputs == outputs
        assert plan.is_one_sum
        assert plan.num_copies == 0


def test_two_memories_exchange_a_value_and_the_result() -> None:
    plan = all_reduce_plan(one_device(2, destinations=[0, 1]), ("a", "b"))

    assert plan.steps == (
        Copy(source=1, target=2, place=0),
        Combine((0, 2), (3,), is_result=True, is_whole=True),
        Copy(source=3, target=4, place=1),
    )
    assert plan.outputs == (3, 4)
    assert not plan.is_one_sum


def test_partial_sums_are_made_before_they_travel() -> None:
    plan = all_reduce_plan(two_level(((0, 1), (2, 3))), ("a", "b", "c", "d"))

    combined = [step for step in plan.steps if isinstance(step, Combine)]

    # 2 + 3 on place 2; then 0 + 1, which has not travelled, and the two halves on place 0.
    assert [(step.is_result, step.is_whole) for step in combined] == [
        (False, True),
        (False, True),
        (True, False),
    ]


def test_places_that_share_a_memory_exchange_nothing() -> None:
    plan = all_reduce_plan(two_level(((0, 1), (2, 3))), ("a", "a", "b", "b"))

    # The sum 2 + 3 crosses, and the result crosses back; its twin in memory b is made there.
    assert plan.steps[:4] == (
        Combine((2, 3), (4,), is_result=False, is_whole=True),
        Copy(source=4, target=5, place=0),
        Combine((0, 1), (6,), is_result=False, is_whole=True),
        Combine((6, 5), (7, 9), is_result=True, is_whole=False),
    )


def test_every_destination_gets_a_buffer_of_its_own() -> None:
    for memories in (("a", "a", "a"), ("a", "b", "b"), ("a", "b", "c")):
        plan = all_reduce_plan(one_device(3, destinations=range(3)), memories)

        assert len(set(plan.outputs)) == 3
        assert set(plan.outputs).isdisjoint(range(3))


def test_a_destination_named_twice_gets_two_buffers() -> None:
    plan = make_plan(one_device(2, destinations=[0]), 2, ("a", "b"), (0, 0))

    assert len(set(plan.outputs)) == 2


def test_outputs_follow_the_order_of_the_destinations() -> None:
    schedule = one_device(3, destinations=range(3))
    forward = make_plan(schedule, 3, ("a", "b", "c"), (0, 1, 2))
    backward = make_plan(schedule, 3, ("a", "b", "c"), (2, 1, 0))

    assert forward.outputs == backward.outputs[::-1]


def test_a_root_may_hold_no_value() -> None:
    plan = make_plan(one_device(2, root=2, destinations=[2]), 2, ("a", "b", "c"), (2,))

    assert plan.steps == (
        Copy(source=0, target=2, place=2),
        Copy(source=1, target=3, place=2),
        Combine((2, 3), (4,), is_result=True, is_whole=True),
    )


def test_one_value_for_another_memory_is_copied_once_and_combined_once() -> None:
    plan = make_plan(one_device(1, root=1, destinations=[1]), 1, ("a", "b"), (1,))

    assert plan.num_copies == 1
    assert sum(isinstance(step, Combine) for step in plan.steps) == 1


def test_a_whole_sum_may_travel_on() -> None:
    schedule = (Gather(1, (0, 2)), Gather(3, (1,)), Spread(3, (0, 1, 2)))

    plan = make_plan(schedule, 3, ("a", "b", "c", "d"), (0, 1, 2, 3))

    results = [step for step in plan.steps if isinstance(step, Combine) and step.is_result]
    assert [len(step.sources) for step in results] == [3]


def test_a_plan_is_worked_out_once() -> None:
    schedule = one_device(2, destinations=[0])

    assert make_plan(schedule, 2, ("a", "b"), (0,)) is make_plan(schedule, 2, ("a", "b"), (0,))
