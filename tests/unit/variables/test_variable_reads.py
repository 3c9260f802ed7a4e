"""`ON_READ` variables: replicas write for themselves, a read combines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unisono.options import VariableAggregation
from unisono.strategies import MirroredStrategy
from unit.variables.made import FIRST, MEAN, NONE, ON_READ, SUM, made, number, numbers, replica_id


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 5), (MEAN, 2.5), (FIRST, 2)])
def test_a_read_combines_what_replicas_wrote(
    pair: MirroredStrategy, aggregation: VariableAggregation, expected: float
) -> None:
    variable = made(pair, 1.0, aggregation, ON_READ)

    pair.run(lambda: variable.assign_add(number()))

    assert numbers(variable) == [2, 3]
    for _ in range(2):
        assert variable.value().tolist() == variable.numpy() == float(variable) == expected
    with pair.scope():
        assert float(variable + 1) == expected + 1
    assert [one.tolist() for one in pair.run(lambda: variable * 1).values] == [2, 3]


def test_replica_writes_meet_nobody(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, SUM, ON_READ)

    pair.run(lambda: variable.assign(5.0) if replica_id() else None)
    pair.run(lambda: variable.assign_sub(number()) if replica_id() else None)

    assert numbers(variable) == [1, 3]


def test_without_aggregation_nothing_is_read_nor_written(strategy: MirroredStrategy) -> None:
    variable = made(strategy, 1.0, NONE, ON_READ)
    everywhere = strategy.num_replicas_in_sync

    for write in (variable.assign, variable.assign_add, variable.assign_sub):
        with pytest.raises(ValueError, match="nothing was written"):
            write(6.0)
    with pytest.raises(ValueError, match="no single value"):
        variable.value()
    assert numbers(variable) == [1.0] * everywhere
    variable.assign(6.0, read_value=False)
    variable.assign_add(1.0, read_value=False)
    assert numbers(variable) == [7.0] * everywhere
    strategy.run(lambda: variable.assign_add(number()))
    assert numbers(variable) == [8.0 + i for i in range(everywhere)]


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_what_is_assigned_for_all_replicas_is_read_back(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 1.0, aggregation, ON_READ)
    num_replicas = strategy.num_replicas_in_sync

    assert float(variable) == (num_replicas if aggregation is SUM else 1)
    for _ in range(2):
        assert float(variable.assign(6.0)) == 6
        share = 6 / num_replicas if aggregation is SUM else 6
        assert numbers(variable) == [share] * num_replicas


def test_a_sum_takes_no_additions_for_all_replicas(strategy: MirroredStrategy) -> None:
    variable = made(strategy, 1.0, SUM, ON_READ)

    for write in (variable.assign_add, variable.assign_sub):
        with pytest.raises(ValueError, match="once per replica"):
            write(1.0)
    assert numbers(variable) == [1.0] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("aggregation", [MEAN, FIRST])
def test_others_take_additions_for_all_replicas(
    pair: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(pair, 1.0, aggregation, ON_READ)
    pair.run(lambda: variable.assign(number()))

    variable.assign_add(2.0)
    variable.assign_sub(1.0)

    assert numbers(variable) == [2, 3]


def test_an_integer_sum_loses_no_remainder(pair: MirroredStrategy) -> None:
    variable = made(pair, 1, SUM, ON_READ)

    with pytest.raises(ValueError, match="multiple of 2"):
        variable.assign(7)
    assert numbers(variable) == [1, 1]
    variable.assign(8)
    assert numbers(variable) == [4, 4]


@pytest.mark.parametrize("value", [7, -7, 7.5])
def test_a_saved_sum_is_restored_whole(strategy: MirroredStrategy, value: float) -> None:
    variable = made(strategy, value * 0, SUM, ON_READ)

    for _ in range(2):
        variable.load(value)
        assert variable.state().item() == value
    assert max(numbers(variable)) - min(numbers(variable)) <= 1


READS: list[Callable[[Any], Any]] = [
    lambda v: v.value(),
    lambda v: v.read_value(),
    lambda v: v.strategy.extended.read_var(v),
    lambda v: v[:],
    lambda v: next(iter(v)),
    lambda v: +v,
    lambda v: v.detach(),
    lambda v: v.view(-1),
    lambda v: v.real,
    lambda v: torch.reshape(v, (-1,)),
    lambda v: torch.unbind(v)[0],
    lambda v: v.assign(v),
    lambda v: v.numpy(),
]


@pytest.mark.parametrize("read", READS)
def test_reads_are_snapshots(pair: MirroredStrategy, read: Callable[[Any], Any]) -> None:
    variable = made(pair, [1.0], MEAN)

    def step() -> Any:
        old = read(variable)
        variable.assign_add(torch.ones(1))
        return torch.as_tensor(old).detach().clone().sum()

    assert [one.item() for one in pair.run(step).values] == [1, 1]
    assert numbers(variable) == [[2.0], [2.0]]
    if read is not READS[-2]:
        old = read(variable)
        variable.assign_add([1.0])
        assert torch.as_tensor(old).sum().item() == 2


def test_gradients_flow_through_a_snapshot(pair: MirroredStrategy) -> None:
    variable = made(pair, [1.0, 2.0], MEAN)

    pair.run(lambda: (variable.read_value()[1:] * number()).sum().backward())

    assert variable.values[0].grad.tolist() == [0, 1.5]


def test_a_snapshot_is_not_a_way_to_write(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0)

    with pytest.raises(AttributeError, match="cannot be changed in place"):
        variable.data.zero_()


def test_a_state_is_a_copy(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, MEAN)
    state = variable.state()

    variable.assign(2.0)

    assert (state.item(), state.requires_grad) == (1, False)
    variable.load(state)
    assert numbers(variable) == [1, 1]
