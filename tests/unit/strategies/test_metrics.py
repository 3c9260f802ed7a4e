"""Metrics over an epoch count each sample once, however it divides over the replicas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]

# Each sample weighs its own power of two, so that one that is lost or doubled changes the sum.
WEIGHTS = 2.0 ** torch.arange(11)
ON_READ_SUM: dict[str, Any] = {
    "synchronization": uo.VariableSynchronization.ON_READ,
    "aggregation": uo.VariableAggregation.SUM,
}

each_division = pytest.mark.parametrize(
    ("num_replicas", "batch_size"), [(1, 4), (2, 4), (3, 4), (4, 3), (3, 1), (4, 11), (2, 16)]
)


def loader(batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(WEIGHTS), batch_size=batch_size)


@each_division
def test_a_sum_over_samples(mirrored: Make, num_replicas: int, batch_size: int) -> None:
    strategy = mirrored(num_replicas)
    total, seen = 0.0, 0

    for (weights,) in strategy.experimental_distribute_dataset(loader(batch_size)):
        found = strategy.run(lambda part: part, args=(weights,))
        total += strategy.reduce("SUM", found, axis=0).item()
        seen += sum(len(part) for part in strategy.experimental_local_results(found))

    assert (total, seen) == (WEIGHTS.sum().item(), 11)


@each_division
def test_variables_that_replicas_add_to(mirrored: Make, num_replicas: int, batch_size: int) -> None:
    strategy = mirrored(num_replicas)
    with strategy.scope():
        total = uo.Variable(0.0, **ON_READ_SUM)
        seen = uo.Variable(0, **ON_READ_SUM)

    def step(part: Tensor) -> None:
        total.assign_add(part.sum())
        seen.assign_add(len(part))

    for epoch in (1, 2):
        for (weights,) in strategy.experimental_distribute_dataset(loader(batch_size)):
            strategy.run(step, args=(weights,))
        assert (float(total), int(seen)) == (epoch * WEIGHTS.sum().item(), epoch * 11)


@each_division
def test_a_mean_over_samples(mirrored: Make, num_replicas: int, batch_size: int) -> None:
    strategy = mirrored(num_replicas)

    for (weights,) in strategy.experimental_distribute_dataset(loader(batch_size)):
        found = strategy.run(lambda part: part, args=(weights,))
        whole = torch.cat(strategy.experimental_local_results(found))
        mean = strategy.reduce("MEAN", found, axis=0)
        assert mean.item() == pytest.approx(whole.mean().item())
