"""Trains in two processes and counts with metrics over both.

    unisono launch -n 2 tests/newcomer/two_workers.py

Written from the documentation alone: many workers, metrics.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo


def data() -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    inputs = torch.randn(45, 6, generator=dice)
    return TensorDataset(inputs, (inputs[:, 0] > inputs[:, 1]).long())


def main() -> None:
    torch.manual_seed(0)
    strategy = uo.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        num_right = uo.Variable(
            0,
            synchronization=uo.VariableSynchronization.ON_READ,
            aggregation=uo.VariableAggregation.SUM,
        )

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        scores = model(x)
        losses = nn.functional.cross_entropy(scores, y, reduction="none")
        losses.mean().backward()
        optimizer.step()
        num_right.assign_add((scores.argmax(1) == y).sum())
        return losses.detach()  # one number per sample

    # 45 samples in batches of 8: the last batch has 5, so the workers get 3 and 2.
    batches = strategy.experimental_distribute_dataset(DataLoader(data(), batch_size=8))
    loss_sum, seen = 0.0, 0
    for _ in range(3):
        for batch in batches:
            losses = strategy.run(step, args=batch)
            loss_sum += strategy.reduce("SUM", losses, axis=0).item()
            seen += len(strategy.gather(losses, axis=0))
    found = {
        "replicas": strategy.num_replicas_in_sync,
        "loss": loss_sum / seen,
        "accuracy": int(num_right) / seen,
        "seen": seen,
        "weight": model.weight.tolist(),
    }
    # Every worker has the same values; each one prints them, so that a test can compare.
    print("FOUND " + json.dumps(found), flush=True)
    strategy.close()


if __name__ == "__main__":
    main()
