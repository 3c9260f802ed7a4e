"""What a step does once for all replicas, on real workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import unisono as uo
from processes.test_multi_worker import on_workers


def noisy(strategy: uo.Strategy, rank: int = 0) -> dict[str, Any]:
    """Trains with gradients, noise and a rate by hand, and returns the weights."""
    torch.manual_seed(5)
    with strategy.scope():
        model = nn.Linear(2, 1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def add_noise() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(torch.randn_like(p))

    def step() -> None:
        context: Any = uo.get_replica_context()
        x = torch.full((3, 2), context.replica_id_in_sync_group + 1.0, dtype=torch.float64)
        optimizer.zero_grad()
        parameters: list[Tensor] = list(model.parameters())
        gradients = torch.autograd.grad(model(x).square().mean(), parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        uo.once(add_noise)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    for _ in range(3):
        strategy.run(step)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    return {name: p.flatten().tolist() for name, p in model.named_parameters()}


def test_layouts_agree_to_the_bit() -> None:
    first, second = on_workers(2, noisy, num_replicas=2)
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    alone = noisy(strategy)
    strategy.close()

    assert first == second == alone
