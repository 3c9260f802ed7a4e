"""Preempted workers of an elastic job leave it, and the others go on."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from processes.crew import Crew, Desk
from processes.harness import strategy_of
from processes.ports import free_ports

NUM_STEPS = 16
# Who is preempted, and before which step.
Plan = dict[int, int]


class Outcome(NamedTuple):
    """How a worker has ended: its status if it has left, its weights, and what it has logged."""

    status: int | None
    num_steps: int
    bits: list[bytes]
    lines: list[str]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(desk: Desk, rank: int, ports: list[int], plan: Plan, folder: Path, how: str) -> Outcome:
    """Trains until the end, or until this worker leaves."""
    log = Lines()
    logging.getLogger("unisono").addHandler(log)
    elastic = len(ports) > 1
    strategy = strategy_of(rank, ports, 1, num_replicas=5, elastic=elastic)
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(42, 6))
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = strategy.experimental_distribute_dataset(DataLoader(data, 16, shuffle=True))

    def on_replica(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step(x: Any) -> None:
        strategy.reduce("MEAN", strategy.run(on_replica, args=(x,)))

    stop = folder / f"stop {rank}"
    config = uo.experimental.TerminationConfig(
        termination_watcher_fn=stop.exists if how == "file" else signal.SIGUSR1
    )
    checkpoint = uo.experimental.Checkpoint(model=model, optimizer=optimizer, input=batches)
    handler = uo.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint, folder / "saved", config
    )
    status = None
    try:
        while handler.total_run_calls < NUM_STEPS:
            for (x,) in batches:
                if plan.get(rank) == handler.total_run_calls:
                    stop.touch() if how == "file" else os.kill(os.getpid(), getattr(signal, how))
                if plan.get(rank, NUM_STEPS) <= handler.total_run_calls and len(plan) < len(ports):
                    # It leaves before the steps are over.
                    time.sleep(0.3)
                handler.run(step, x)
                if handler.total_run_calls == NUM_STEPS:
                    break
    except SystemExit as left:
        status = int(left.code or 0)
    finally:
        handler.close()
        strategy.close()
        logging.getLogger("unisono").removeHandler(log)
    bits = [one.detach().numpy().tobytes() for one in model.state_dict().values()]
    return Outcome(status, handler.total_run_calls, bits, log.lines)


def job(crew: Crew, size: int, plan: Plan, folder: Path, how: str = "SIGTERM") -> list[Outcome]:
    """Lets some of the crew train together."""
    folder.mkdir(exist_ok=True)
    ports = free_ports(size)
    for rank, member in enumerate(crew.members[:size]):
        member.begin(train, rank, ports, plan, folder, how)
    return [member.hear(120) for member in crew.members[:size]]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as crew:
        yield crew


@pytest.fixture(scope="module")
def alone(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What a worker finds that nobody disturbs."""
    (found,) = job(crew, 1, {}, tmp_path_factory.mktemp("alone"))
    return found


def test_preempted_workers_leave_and_the_others_keep_the_bits(
    crew: Crew, alone: Outcome, tmp_path: Path
) -> None:
    # The first worker, and then one of those that are left.
    first, second, third = job(crew, 3, {0: 2, 2: 9}, tmp_path)

    assert [first.status, second.status, third.status] == [0, None, 0]
    assert second.bits == alone.bits
    # Nobody was given up, no step was made again, and no checkpoint was needed.
    told = [line for line in second.lines if "takes over" in line]
    assert [line.split(":")[0] for line in told] == ["Worker 0 left", "Worker 2 left"]
    assert all("No run was undone" in line for line in told)
    assert not (tmp_path / "saved").exists()


def test_a_file_can_preempt_a_worker(crew: Crew, alone: Outcome, tmp_path: Path) -> None:
    first, second = job(crew, 2, {0: 3}, tmp_path, "file")

    assert (first.status, second.bits) == (0, alone.bits)


def test_workers_that_are_all_preempted_stop_at_the_same_step_and_save(
    crew: Crew, alone: Outcome, tmp_path: Path
) -> None:
    stopped = job(crew, 3, {0: 5, 1: 5, 2: 5}, tmp_path, "SIGUSR1")
    assert [(one.status, one.num_steps) for one in stopped] == [(0, 6)] * 3
    assert [one.name for one in (tmp_path / "saved").iterdir()] == ["ckpt-1.pt"]

    resumed = job(crew, 2, {}, tmp_path)
    assert [one.bits == alone.bits for one in resumed] == [True, True]
