"""A small training whose every part is saved: the weights, the momentum, the input, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo

# Makes the arguments of `register_comm_hook`.
Hook = Callable[[uo.Strategy], tuple[Any, Any]]


class Training:
    """Trains on `num_replicas`; each step also changes a scheduler and a variable."""

    def __init__(self, num_replicas: int = 2, hook: Hook | None = None) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
        self.strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        if hook is not None:
            self.strategy.register_comm_hook(*hook(self.strategy))
        with self.strategy.scope():
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
            self.seen = uo.Variable(
                torch.zeros(()),
                synchronization=uo.VariableSynchronization.ON_READ,
                aggregation=uo.VariableAggregation.SUM,
            )
        loader = DataLoader(data, batch_size=8, shuffle=True)
        self.batches = self.strategy.experimental_distribute_dataset(loader)
        self.checkpoint = uo.experimental.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            seen=self.seen,
            input=self.batches,
        )

    def step(self, x: Tensor, y: Tensor) -> None:
        def on_replica(x: Tensor, y: Tensor) -> None:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            self.seen.assign_add(torch.tensor(float(len(x))))

        self.strategy.run(on_replica, args=(x, y))
        self.scheduler.step()

    def result(self) -> dict[str, Any]:
        return {
            "weights": torch.cat([p.detach().flatten() for p in self.model.parameters()]),
            "rate": torch.tensor(self.optimizer.param_groups[0]["lr"]),
            "seen": self.seen.state(),
            "next": torch.rand(()),
        }


def are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)
