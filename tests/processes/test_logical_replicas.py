"""Replicas that workers share unevenly, on real processes: the same bits as in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from processes.harness import run_ranks, strategy_of
from processes.ports import free_ports

# Larger than what travels in one message.
WIDTH = 300


def train(strategy: uo.Strategy) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(40, 20, generator=generator), torch.randint(3, (40,), generator=generator)
    )
    with strategy.scope():
        torch.manual_seed(11)
        model = nn.Sequential(
            nn.Linear(20, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, 3)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    loader = DataLoader(data, batch_size=18, shuffle=True, drop_last=True)
    losses = [
        strategy.reduce("MEAN", strategy.run(step, args=batch))
        for batch in strategy.experimental_distribute_dataset(loader)
    ]
    found = {"losses": torch.stack(losses)} | model.state_dict()
    bits = {name: one.detach().numpy().tobytes() for name, one in found.items()}
    return {"replicas": len(strategy.extended.worker_devices)} | bits


def train_on(store: Store, rank: int, size: int, ports: list[int]) -> list[dict[str, Any]]:
    """Trains with five replicas on all workers, and with one per device."""
    # Neither what a worker draws of its own accord matters, nor how many threads torch has.
    torch.manual_seed(rank)
    torch.set_num_threads(1 + rank)
    found = []
    for settings in ({"num_replicas": 5}, {}):
        strategy = strategy_of(rank, ports, 5 if size == 1 else (1, 3, 1)[rank], **settings)
        try:
            found.append(train(strategy))
        finally:
            strategy.close()
    return found


def test_dealt_replicas_and_unequal_devices_give_the_bits_of_one_process() -> None:
    ((alone, _),) = run_ranks(1, train_on, free_ports(1))
    workers = run_ranks(3, train_on, free_ports(3))

    assert [[one.pop("replicas") for one in both] for both in workers] == [[2, 1], [2, 3], [1, 1]]
    assert alone.pop("replicas") == 5
    for dealt, by_device in workers:
        assert [name for name in alone if dealt[name] != alone[name]] == []
        # One replica per device shares the threads of its worker, and agrees on all workers.
        assert by_device == workers[0][1]
