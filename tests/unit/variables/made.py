"""Variables to test, and what replicas write to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from unisono.contexts import get_replica_context
from unisono.options import VariableAggregation
from unisono.strategies import MirroredStrategy
from unisono.values import DistributedValues
from unisono.variables import Variable, VariableSynchronization

NONE, SUM, MEAN = VariableAggregation.NONE, VariableAggregation.SUM, VariableAggregation.MEAN
FIRST = VariableAggregation.ONLY_FIRST_REPLICA
ON_WRITE, ON_READ = VariableSynchronization.ON_WRITE, VariableSynchronization.ON_READ

each_aggregation = pytest.mark.parametrize("aggregation", list(VariableAggregation))
each_synchronization = pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])


@contextmanager
def replicas(num_replicas: int, *, serial: bool = False) -> Iterator[MirroredStrategy]:
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], serial=serial)
    try:
        yield strategy
    finally:
        strategy.close()


def made(
    strategy: MirroredStrategy,
    value: Any = 1.0,
    aggregation: VariableAggregation = NONE,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    **kwargs: Any,
) -> Variable:
    with strategy.scope():
        return Variable(value, synchronization=synchronization, aggregation=aggregation, **kwargs)


def replica_id() -> int:
    context = get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def number() -> torch.Tensor:
    """What a replica writes: 1, 2, 3, ..."""
    return torch.tensor(replica_id() + 1.0)


def numbers(variable: DistributedValues) -> list[Any]:
    return [component.tolist() for component in variable.values]


def aggregated(aggregation: VariableAggregation, num_replicas: int) -> list[float]:
    given = [i + 1.0 for i in range(num_replicas)]
    if aggregation is NONE:
        return given
    one = {SUM: sum(given), MEAN: sum(given) / num_replicas, FIRST: given[0]}[aggregation]
    return [one] * num_replicas
