"""Workers of an elastic job are killed, and the others end with the bits of an undisturbed job."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from processes.harness import Ranks, run_ranks, strategy_of
from processes.ports import free_ports

NUM_REPLICAS = 5
NUM_EPOCHS = int(os.environ.get("NUM_EPOCHS", "3"))

# Who is killed, in which run, and where.
Plan = dict[int, tuple[int, str]]


class Fate:
    """Kills this process at one point of one run."""

    def __init__(self, rank: int, plan: Plan) -> None:
        self._run, self._point = plan.get(rank, (-1, ""))
        self.run = 0

    def __call__(self, point: str) -> None:
        if self.run == self._run and point == self._point:
            os.kill(os.getpid(), signal.SIGKILL)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(strategy: uo.Strategy, fate: Fate) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.arange(44.0),
        torch.randn(44, 20, generator=generator),
        torch.randint(3, (44,), generator=generator),
    )
    with strategy.scope():
        torch.manual_seed(11)
        model = nn.Sequential(
            nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Dropout(0.3), nn.Linear(40, 3)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    optimizer.register_step_pre_hook(lambda *_: fate("at the update"))
    optimizer.register_step_post_hook(lambda *_: fate("after the update"))
    model[0].weight.register_hook(lambda grad: fate("in the backward pass"))

    def step(numbers: Tensor, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        fate("before the backward pass")
        loss.backward()
        fate("after the backward pass")
        optimizer.step()
        scheduler.step()
        fate("at the end")
        return loss.detach(), numbers

    loader = DataLoader(data, batch_size=16, shuffle=True)
    distributed = strategy.experimental_distribute_dataset(loader)
    losses, samples = [], []
    for _ in range(NUM_EPOCHS):
        for batch in distributed:
            fate("before the run")
            loss, numbers = strategy.run(step, args=batch)
            fate("after the run")
            losses.append(strategy.reduce("MEAN", loss))
            samples.append(strategy.gather(numbers, axis=0))
            fate.run += 1
    found = {"losses": torch.stack(losses), "samples": torch.cat(samples)} | model.state_dict()
    for i, state in enumerate(optimizer.state.values()):
        found |= {f"{name} {i}": value for name, value in state.items()}
    found["next random number"] = torch.rand(1)
    bits = {name: one.detach().numpy().tobytes() for name, one in found.items()}
    return bits | {"lr": scheduler.get_last_lr()}


def work(store: Store, rank: int, size: int, ports: list[int], plan: Plan, elastic: bool) -> Any:
    log = Lines()
    logging.getLogger("unisono").addHandler(log)
    torch.manual_seed(rank)
    strategy = strategy_of(rank, ports, 1, num_replicas=NUM_REPLICAS, elastic=elastic)
    try:
        return train(strategy, Fate(rank, plan)), log.lines
    finally:
        strategy.close()


def survivors_of(size: int, plan: Plan) -> dict[int, Any]:
    with Ranks(size, work, free_ports(size), plan, True) as ranks:
        found = ranks.results(100)
    assert sorted(found) == sorted(set(range(size)) - set(plan))
    return found


def undisturbed() -> dict[str, Any]:
    ((alone, _),) = run_ranks(1, work, free_ports(1), {}, False)
    return alone


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if found[name] != expected[name]]


def test_survivors_of_kills_in_a_step_have_the_bits_of_an_undisturbed_job() -> None:
    plan = {
        3: (1, "in the backward pass"),
        0: (3, "at the update"),
        2: (6, "after the update"),
    }
    expected = undisturbed()
    for _, (found, lines) in survivors_of(4, plan).items():
        assert differing(found, expected) == []
        assert len([line for line in lines if line.startswith("Lost worker")]) == 3


def test_survivors_of_kills_around_a_step_have_the_bits_of_an_undisturbed_job() -> None:
    plan = {
        1: (0, "before the run"),
        2: (2, "at the end"),
        0: (4, "after the run"),
    }
    expected = undisturbed()
    for _, (found, _) in survivors_of(5, plan).items():
        assert differing(found, expected) == []
