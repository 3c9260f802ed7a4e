import pytest

from unisono.algorithms import Gather, Spread, make_plan, num_steps, num_transfers, one_device


def test_all_goes_to_the_root_and_back() -> None:
    schedule = one_device(3, root=1, destinations=range(3))

    assert schedule == (Gather(1, (0, 2)), Spread(1, (0, 2)))


def test_the_root_may_hold_no_value_and_get_no_result() -> None:
    schedule = one_device(2, root=2, destinations=[3])

    assert schedule == (Gather(2, (0, 1)), Spread(2, (3,)))


@pytest.mark.parametrize("num_replicas", range(1, 10))
def test_an_all_reduce_sends_all_but_one_each_way(num_replicas: int) -> None:
    for root in range(num_replicas):
        schedule = one_device(num_replicas, root=root, destinations=range(num_replicas))

        assert num_transfers(schedule) == 2 * (num_replicas - 1)
        assert num_steps(schedule) == 2


@pytest.mark.parametrize("num_replicas", range(1, 10))
def test_a_plan_copies_what_the_schedule_transfers(num_replicas: int) -> None:
    everywhere = tuple(range(num_replicas))
    schedule = one_device(num_replicas, destinations=everywhere)

    plan = make_plan(schedule, num_replicas, everywhere, everywhere)

    assert plan.num_copies == 2 * (num_replicas - 1)


@pytest.mark.parametrize("num_replicas", range(1, 10))
def test_a_single_destination_gets_no_copy_back(num_replicas: int) -> None:
    schedule = one_device(num_replicas, destinations=[0])

    plan = make_plan(schedule, num_replicas, tuple(range(num_replicas)), (0,))

    assert plan.num_copies == num_replicas - 1
