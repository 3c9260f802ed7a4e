"""Variables on replicas, in other scopes, in reductions and in copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from unisono.errors import ContextError
from unisono.options import VariableAggregation
from unisono.strategies import MirroredStrategy
from unisono.values import Mirrored, PerReplica
from unisono.variables import Variable, VariableSynchronization
from unit.variables.made import (
    MEAN,
    NONE,
    ON_READ,
    SUM,
    each_aggregation,
    each_synchronization,
    made,
    number,
    numbers,
    replicas,
)


def test_a_variable_of_no_strategy_is_written_in_any_scope_but_not_on_a_replica() -> None:
    variable = Variable(2.0, name="free")

    with replicas(2) as strategy:
        with strategy.scope():
            assert variable.assign_add(3.0).item() == 5
            variable.load(4.0)
        with pytest.raises(ContextError, match="Variable 'free' was made under DefaultStrategy"):
            strategy.run(lambda: variable.assign_add(1.0))

    assert variable.item() == 4


def test_a_variable_says_whose_it_is(pair: MirroredStrategy) -> None:
    assert made(pair, 1.0).distribute_strategy is pair


def test_other_strategies_may_read_but_not_write(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.5, MEAN, name="w")

    with replicas(2) as other, other.scope():
        assert (variable * 2).item() == 3
        for write in (variable.assign, variable.load):
            with pytest.raises(ContextError, match=r"Variable 'w' was made under"):
                write(1.0)
    assert numbers(variable) == [1.5, 1.5]


def test_a_checkpoint_is_not_for_replicas(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, MEAN)

    for call in (variable.state, lambda: variable.load(1.0)):
        with pytest.raises(ContextError, match="called on a replica"):
            pair.run(call)


@each_aggregation
@each_synchronization
def test_outside_every_strategy_there_is_one_replica(
    aggregation: VariableAggregation, synchronization: VariableSynchronization
) -> None:
    variable = Variable(1.0, aggregation=aggregation, synchronization=synchronization)

    variable.assign(5.0)
    variable.assign_add(2)
    assert variable.assign_sub(torch.tensor(1.0)).item() == 6
    assert float(variable) == 6


def test_replicas_see_their_own_component(pair: MirroredStrategy) -> None:
    variable: Any = made(pair, 1.25, NONE)
    factors = PerReplica([torch.tensor(5.0), torch.tensor(3.0)])

    assert [one.item() for one in pair.run(lambda: variable * 2).values] == [2.5, 2.5]
    products = pair.run(lambda factor: factor * variable, args=(factors,))
    assert [one.item() for one in products.values] == [6.25, 3.75]
    pair.run(lambda: variable.assign(number()))
    assert [one.item() for one in pair.run(lambda: torch.add(variable, 1)).values] == [2, 3]
    assert float(variable) == 1


def test_a_variable_can_be_reduced_and_be_a_destination(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, NONE)
    pair.run(lambda: variable.assign(number()))
    ops = pair.extended.cross_device_ops

    for _ in range(2):
        assert pair.extended.reduce_to("mean", variable, "cpu:0").item() == 1.5
        copied = ops.broadcast(torch.tensor(4.0), variable)
        assert isinstance(copied, Mirrored)
        assert copied.devices == variable.devices


def test_a_deep_copy_is_apart_and_under_the_same_strategy(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, SUM, ON_READ)
    pair.run(lambda: variable.assign(number()))

    duplicate = copy.deepcopy(variable)
    variable.assign(0.0)
    pair.run(lambda: duplicate.assign_add(1.0))

    assert numbers(duplicate) == [2, 3]
    assert float(duplicate) == 5
