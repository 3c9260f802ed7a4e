from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_replica import replica, replica_id
from torch import Tensor

import unisono as uo
from unisono.errors import UnequalCallsError

Make = Callable[..., uo.MirroredStrategy]


def test_merge_call_sees_the_values_of_all_replicas(mirrored: Make) -> None:
    strategy = mirrored()

    def merge(merged: uo.Strategy, value: Any) -> Any:
        return merged.reduce("SUM", value)

    def step() -> Tensor:
        value = torch.tensor(3.0 + replica_id())
        first = replica().merge_call(merge, args=(value,))
        second = replica().merge_call(merge, kwargs={"value": value})
        assert torch.equal(first, second)
        total: Tensor = first + value
        return total

    results = strategy.experimental_local_results(strategy.run(step))

    assert [result.item() for result in results] == [10, 11]


def test_replicas_get_their_components_of_what_merge_returns(mirrored: Make) -> None:
    strategy = mirrored()

    def merge(_: uo.Strategy) -> Any:
        return {"own": uo.PerReplica((1, 10)), "all": 7}

    results = strategy.experimental_local_results(
        strategy.run(lambda: replica().merge_call(merge)),
    )

    assert results == ({"own": 1, "all": 7}, {"own": 10, "all": 7})


def test_the_merge_function_of_replica_0_is_called_once(mirrored: Make) -> None:
    strategy = mirrored(3)
    calls: list[int] = []

    def step() -> Any:
        own = replica_id()

        def merge(_: uo.Strategy) -> int:
            calls.append(own)
            return own

        return replica().merge_call(merge), replica().merge_call(merge)

    assert strategy.run(step) == (0, 0)
    assert calls == [0, 0]


def test_one_object_is_not_wrapped_for_merge(mirrored: Make) -> None:
    shared = torch.ones(2)

    def merge(_: uo.Strategy, value: Any) -> bool:
        return value is shared

    assert mirrored().run(lambda: replica().merge_call(merge, args=(shared,))) is True


def test_unequal_numbers_of_merge_calls_are_an_error(mirrored: Make) -> None:
    strategy = mirrored(3)

    def step() -> None:
        for _ in range(1 + (replica_id() == 1)):
            replica().merge_call(lambda _: None)

    with pytest.raises(UnequalCallsError, match=r"replica 1 is in merge_call\(\).*has returned"):
        strategy.run(step)
    assert strategy.run(lambda: 5) == 5


def test_different_calls_are_an_error_that_names_both(mirrored: Make) -> None:
    strategy = mirrored()

    def step() -> None:
        if replica_id() == 0:
            replica().merge_call(lambda _: None)
        else:
            replica().all_reduce("SUM", torch.ones(1))

    with pytest.raises(RuntimeError, match=r"replica 0 is in merge_call.*replica 1 is in all_red"):
        strategy.run(step)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_a_replica_is_raised_as_it_is(mirrored: Make, failing: int) -> None:
    strategy = mirrored(3)

    def step() -> None:
        if replica_id() == failing:
            raise LookupError("no gradient here")
        replica().merge_call(lambda _: None)

    for _ in range(2):
        with pytest.raises(LookupError, match="no gradient here"):
            strategy.run(step)


def test_an_error_in_a_merge_function_is_raised_as_it_is(mirrored: Make) -> None:
    strategy = mirrored()

    def merge(_: uo.Strategy) -> None:
        raise LookupError("in merge")

    for _ in range(2):
        with pytest.raises(LookupError, match="in merge"):
            strategy.run(lambda: replica().merge_call(merge))


def test_what_a_merge_returns_for_fewer_replicas_is_an_error(mirrored: Make) -> None:
    strategy = mirrored()

    with pytest.raises(ValueError, match="none for replica 1"):
        strategy.run(lambda: replica().merge_call(lambda _: uo.PerReplica((1,))))


def test_outside_a_merge_call_calls_the_function() -> None:
    assert replica().merge_call(lambda strategy, x: x + 1, args=(4,)) == 5


def test_replica_id_is_known_in_a_hook_of_the_backward_pass(mirrored: Make) -> None:
    strategy = mirrored()

    def step() -> list[int]:
        seen: list[int] = []
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: seen.append(replica_id()))
        (x * 2).sum().backward()
        return seen

    assert strategy.experimental_local_results(strategy.run(step)) == ([0], [1])


@pytest.mark.parametrize(
    "call",
    [
        lambda context: context.merge_call(lambda _: 1),
        lambda context: context.all_reduce("SUM", torch.ones(1)),
        lambda context: context.all_gather(torch.ones(1), 0),
    ],
    ids=["merge_call", "all_reduce", "all_gather"],
)
def test_a_context_that_was_kept_is_refused(mirrored: Make, call: Callable[[Any], Any]) -> None:
    strategy, other = mirrored(), mirrored()
    kept = strategy.experimental_local_results(strategy.run(uo.get_replica_context))

    def on_its_replica() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return call(kept[context.replica_id_in_sync_group])

    refusal = pytest.raises(RuntimeError, match="that the running code is not on")
    with refusal:
        call(kept[0])
    with strategy.scope(), refusal:
        call(kept[1])
    for one in (strategy, other):
        with refusal:
            one.run(on_its_replica)
        assert one.run(lambda: 1) == 1
