"""One weight of 2 replicas, for tests of optimizers, schedulers and scalers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import unisono as uo

# 2 replicas, whose mean gradient of the weight w of y = w x is 5.5.
X = uo.PerReplica((torch.full((1, 1), 1.0), torch.full((1, 1), 10.0)))


class Setup:
    """One weight of 0 that is trained by SGD with a learning rate of 1."""

    def __init__(self, strategy: uo.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = nn.Linear(1, 1, bias=False)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        nn.init.zeros_(self.model.weight)

    @property
    def weight(self) -> float:
        return self.model.weight.item()

    def backward(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).sum().backward()

    def run(self, step: Callable[[Tensor], Any]) -> Any:
        return self.strategy.run(step, args=(X,))
