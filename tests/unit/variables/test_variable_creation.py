"""Making a `Variable`: what it takes, and what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.options import VariableAggregation
from unisono.strategies import MirroredStrategy
from unisono.testing import separate_memories
from unisono.variables.policy import VariableSynchronization
from unisono.variables.variable import Variable
from unit.variables.made import (
    FIRST,
    MEAN,
    NONE,
    ON_READ,
    ON_WRITE,
    SUM,
    aggregated,
    each_synchronization,
    made,
    number,
    numbers,
    replica_id,
    replicas,
)


@pytest.mark.parametrize("synchronization", [VariableSynchronization.NONE, "on_read", None, 3])
def test_no_other_synchronization_is_taken(synchronization: Any) -> None:
    with pytest.raises(ValueError, match="`synchronization` must be one of"):
        Variable(1.0, synchronization=synchronization)


@pytest.mark.parametrize("aggregation", ["sum", None, 1])
def test_no_other_aggregation_is_taken(aggregation: Any) -> None:
    with pytest.raises(ValueError, match="`aggregation` must be one of"):
        Variable(1.0, aggregation=aggregation)


@each_synchronization
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_have_no_mean(
    dtype: torch.dtype, synchronization: VariableSynchronization
) -> None:
    with pytest.raises(ValueError, match="cannot hold the mean"):
        Variable(1, dtype=dtype, synchronization=synchronization, aggregation=MEAN)


def test_variables_are_trainable_unless_they_are_synchronized_on_read() -> None:
    assert Variable(1.0).trainable
    assert not Variable(1.0, synchronization=ON_READ).trainable
    assert Variable(1.0, synchronization=ON_READ, trainable=True).trainable
    assert not Variable(1.0, trainable=False).value().requires_grad


def test_a_policy_cannot_be_changed() -> None:
    variable = Variable(1, synchronization=ON_READ, aggregation=SUM)

    with pytest.raises(AttributeError):
        variable.trainable = True  # type: ignore[misc]


def test_an_initial_value_is_called_once(strategy: MirroredStrategy) -> None:
    calls: list[int] = []

    variable = made(strategy, lambda: calls.append(1) or torch.tensor(7.0))  # type: ignore[func-returns-value]

    assert calls == [1]
    assert numbers(variable) == [7.0] * strategy.num_replicas_in_sync
    assert variable.devices == strategy.extended.worker_devices


def test_a_variable_tells_what_it_is(pair: MirroredStrategy) -> None:
    variable = made(pair, [1, 2], SUM, dtype=torch.float64, name="total")

    assert (variable.name, variable.dtype, variable.shape) == ("total", torch.float64, (2,))
    assert (variable.aggregation, variable.synchronization) == (
        SUM,
        VariableSynchronization.AUTO,
    )
    assert made(pair, 0.1, dtype=torch.float64).numpy() == 0.1


def test_a_variable_does_not_change_what_it_was_made_from(pair: MirroredStrategy) -> None:
    source = torch.zeros(2)

    made(pair, source, FIRST).assign(torch.ones(2))

    assert source.tolist() == [0, 0]


def test_made_on_replicas_there_is_one_that_starts_from_replica_0(
    strategy: MirroredStrategy,
) -> None:
    kept: dict[str, Variable] = {}

    def step() -> Variable:
        if replica_id() not in seen:
            seen.add(replica_id())
            made_here = Variable(lambda: torch.tensor(10.0 + replica_first()), aggregation=SUM)
            kept.setdefault("v", made_here)
        kept["v"].assign_add(number())
        return kept["v"]

    def replica_first() -> int:
        calls.append(1)
        return 0

    seen: set[int] = set()
    calls: list[int] = []
    total = sum(aggregated(NONE, strategy.num_replicas_in_sync))
    for times in (1, 2):
        variable = strategy.run(step)
        assert isinstance(variable, Variable)
        assert numbers(variable) == [10 + times * total] * strategy.num_replicas_in_sync
    assert calls == [1]


def test_an_argument_of_run_stays_a_variable(pair: MirroredStrategy) -> None:
    variable = made(pair, 0.0, SUM)

    for _ in range(2):
        pair.run(lambda v: v.assign_add(number()), args=(variable,))

    assert numbers(variable) == [6, 6]


def test_components_share_a_storage_unless_they_may_differ() -> None:
    with replicas(3) as strategy:
        for synchronization, aggregation, num_storages in [
            *((ON_WRITE, one, 1) for one in (SUM, MEAN, FIRST)),
            (ON_WRITE, NONE, 3),
            *((ON_READ, one, 3) for one in VariableAggregation),
        ]:
            variable = made(strategy, 1.0, aggregation, synchronization)

            assert len({part.data_ptr() for part in variable.values}) == num_storages
            assert len(variable.owners) == num_storages
        with separate_memories():
            assert made(strategy, 1.0, SUM).owners == (0, 1, 2)
