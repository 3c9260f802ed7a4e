"""Facts that hold for every strategy of one worker."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from on_replica import replica as context
from torch import Tensor, nn

import unisono as uo
from unisono.testing import separate_memories

KINDS: dict[str, Callable[[], uo.Strategy]] = {
    "default": uo.get_strategy,
    "one device": lambda: uo.OneDeviceStrategy("cpu:0"),
    "one replica": lambda: uo.MirroredStrategy(["cpu:0"]),
    "two replicas": lambda: uo.MirroredStrategy(["cpu:0", "cpu:1"]),
    "odd devices": lambda: uo.MirroredStrategy(["cpu:3", "cpu:1", "cpu:2"]),
    "serial": lambda: uo.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], serial=True),
    "separate memories": lambda: uo.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    "one-device reduction": lambda: uo.MirroredStrategy(
        ["cpu:0", "cpu:1"], cross_device_ops=uo.ReductionToOneDevice()
    ),
    "hierarchical reduction": lambda: uo.MirroredStrategy(
        ["cpu:0", "cpu:1", "cpu:2"], cross_device_ops=uo.HierarchicalCopyAllReduce()
    ),
    "a copy": lambda: copy.deepcopy(uo.MirroredStrategy(["cpu:0", "cpu:1"])),
}


@pytest.fixture(params=KINDS)
def strategy(request: pytest.FixtureRequest) -> Iterator[uo.Strategy]:
    with ExitStack() as stack:
        if request.param == "separate memories":
            stack.enter_context(separate_memories())
        made = KINDS[request.param]()
        yield made
        made.close()


def power() -> Tensor:
    return torch.tensor(10.0 ** context().replica_id_in_sync_group)


def ones(strategy: uo.Strategy) -> float:
    """1, 11, 111: the sum of the powers of all replicas."""
    return float("1" * strategy.num_replicas_in_sync)


def local(strategy: uo.Strategy, value: Any) -> tuple[Any, ...]:
    return strategy.experimental_local_results(value)


def test_run_calls_the_function_once_a_replica(strategy: uo.Strategy) -> None:
    calls: list[int] = []

    for _ in range(2):
        strategy.run(lambda: calls.append(context().replica_id_in_sync_group))

    assert sorted(calls) == sorted([*range(strategy.num_replicas_in_sync)] * 2)


def test_results_are_in_the_order_of_replica_ids(strategy: uo.Strategy) -> None:
    ids = strategy.run(lambda: context().replica_id_in_sync_group)

    assert local(strategy, ids) == tuple(range(strategy.num_replicas_in_sync))


def test_the_replica_knows_its_strategy(strategy: uo.Strategy) -> None:
    assert strategy.run(lambda: context().strategy is uo.get_strategy() is strategy) is True


def test_reduce_of_what_replicas_return(strategy: uo.Strategy) -> None:
    for _ in range(2):
        assert strategy.reduce("SUM", strategy.run(power)).item() == ones(strategy)


def test_merge_call(strategy: uo.Strategy) -> None:
    def merge(merged: uo.Strategy, value: Any) -> Any:
        assert uo.in_cross_replica_context() or merged.num_replicas_in_sync == 1
        return merged.reduce("SUM", value)

    def step() -> list[float]:
        return [context().merge_call(merge, args=(power(),)).item() for _ in range(2)]

    assert local(strategy, strategy.run(step))[-1] == [ones(strategy)] * 2


def test_all_reduce_and_all_gather(strategy: uo.Strategy) -> None:
    def step() -> list[float]:
        total = context().all_reduce("SUM", power())
        gathered = context().all_gather(power().reshape(1), axis=0)
        return [total.item(), context().all_reduce("MAX", power()).item(), *gathered.tolist()]

    num_replicas = strategy.num_replicas_in_sync
    powers = [10.0**i for i in range(num_replicas)]
    for _ in range(2):
        results = local(strategy, strategy.run(step))
        assert results[-1] == results[0] == [ones(strategy), powers[-1], *powers]


def test_an_error_is_raised_and_the_next_run_works(strategy: uo.Strategy) -> None:
    def step() -> None:
        if context().replica_id_in_sync_group == strategy.num_replicas_in_sync - 1:
            raise LookupError("on the last replica")
        context().all_reduce("SUM", torch.ones(1))

    for _ in range(2):
        with pytest.raises(LookupError, match="on the last replica"):
            strategy.run(step)
        assert strategy.reduce("SUM", strategy.run(power)).item() == ones(strategy)


def test_an_unchanged_program_trains(strategy: uo.Strategy) -> None:
    with strategy.scope() if strategy is not uo.get_strategy() else ExitStack():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    nn.init.zeros_(model.weight)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = (model.weight * power()).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    mean = ones(strategy) / strategy.num_replicas_in_sync
    losses = [strategy.reduce("MEAN", strategy.run(step)).item() for _ in range(2)]

    assert model.weight.item() == pytest.approx(-mean * 2.5)
    assert losses == [0, pytest.approx(-(mean**2))]


def test_a_dataset_is_split_over_the_replicas(strategy: uo.Strategy) -> None:
    batches = [torch.arange(6), torch.arange(6, 11)]

    seen: list[int] = []
    for batch in strategy.experimental_distribute_dataset(batches):
        for part in local(strategy, strategy.run(lambda x: x, args=(batch,))):
            seen.extend(part.tolist())

    assert seen == list(range(11))


def test_values_from_a_function(strategy: uo.Strategy) -> None:
    values = strategy.experimental_distribute_values_from_function(
        lambda value_context: torch.tensor(10.0**value_context.replica_id_in_sync_group)
    )

    assert isinstance(values, uo.DistributedValues)
    assert strategy.reduce("SUM", strategy.run(lambda x: x, args=(values,))).item() == ones(
        strategy
    )


def test_a_deep_copy_works_on_its_own(strategy: uo.Strategy) -> None:
    other = copy.deepcopy(strategy)

    assert other.reduce("SUM", other.run(power)).item() == ones(strategy)
    other.close()
