"""Writes to an `ON_WRITE` variable, against the table of tf.distribute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.errors import UnsupportedError
from unisono.options import VariableAggregation
from unisono.strategies import MirroredStrategy
from unit.variables.made import (
    FIRST,
    MEAN,
    NONE,
    SUM,
    aggregated,
    each_aggregation,
    made,
    number,
    numbers,
    replica_id,
    replicas,
)


@each_aggregation
def test_assign_on_replicas_aggregates(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 9.0, aggregation)

    for _ in range(2):
        strategy.run(lambda: variable.assign(number()))
        assert numbers(variable) == aggregated(aggregation, strategy.num_replicas_in_sync)


@each_aggregation
def test_assign_add_and_sub_on_replicas_aggregate(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 1.0, aggregation)
    change = aggregated(aggregation, strategy.num_replicas_in_sync)

    for _ in range(2):
        strategy.run(lambda: variable.assign_add(number()))
    assert numbers(variable) == [1 + 2 * one for one in change]
    strategy.run(lambda: variable.assign_sub(number()))
    assert numbers(variable) == [1 + one for one in change]


def test_a_mean_of_replica_ids(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, MEAN)

    pair.run(lambda: variable.assign_add(replica_id()))
    assert numbers(variable) == [1.5, 1.5]
    pair.run(lambda: variable.assign(replica_id()))
    assert numbers(variable) == [0.5, 0.5]
    variable.assign(5.0)
    pair.run(lambda: variable.assign_sub(replica_id()))
    assert numbers(variable) == [4.5, 4.5]


@pytest.mark.parametrize("aggregation", [NONE, MEAN, FIRST])
def test_a_number_that_all_replicas_give_counts_once(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 1.0, aggregation)
    all_replicas = strategy.num_replicas_in_sync

    for times in (1, 2):
        strategy.run(lambda: variable.assign_add(5.1))
        expected = float(torch.tensor(1.0) + 5.1 if times == 1 else torch.tensor(1.0) + 5.1 + 5.1)
        assert numbers(variable) == [expected] * all_replicas


@pytest.mark.parametrize("value", [5.0, 0, torch.tensor(5.0)])
def test_a_sum_of_one_value_is_refused(pair: MirroredStrategy, value: Any) -> None:
    variable = made(pair, 1.0, SUM)

    for _ in range(2):
        with pytest.raises(ValueError, match="the same value on all replicas"):
            pair.run(lambda: variable.assign(value))
    assert numbers(variable) == [1, 1]


def test_numbers_are_refused_in_sums_even_where_they_differ(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, SUM)

    with pytest.raises(UnsupportedError, match="its own tensor"):
        pair.run(lambda: variable.assign_add(replica_id() + 1.0))


def test_one_replica_can_assign_a_number_to_a_sum() -> None:
    with replicas(1) as strategy:
        variable = made(strategy, 1.0, SUM)

        strategy.run(lambda: variable.assign(5.0))

        assert numbers(variable) == [5]


@each_aggregation
def test_assignments_for_all_replicas_never_aggregate(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 1.0, aggregation)
    everywhere = strategy.num_replicas_in_sync

    for _ in range(2):
        with strategy.scope():
            variable.assign(6.0)
        variable.assign_add(2)
        variable.assign_sub(torch.tensor(1.0))
        assert numbers(variable) == [7.0] * everywhere


def test_a_global_step_counts_once_a_step(strategy: MirroredStrategy) -> None:
    step = made(strategy, 0, FIRST, dtype=torch.int64)

    for _ in range(2):
        strategy.run(lambda: step.assign_add(1))

    assert numbers(step) == [2] * strategy.num_replicas_in_sync
    assert step.trainable
    assert not step.value().requires_grad
