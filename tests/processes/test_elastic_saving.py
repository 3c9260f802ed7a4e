"""Workers of an elastic job are killed while all of them save a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from processes.crew import Crew, Desk
from processes.harness import Ranks, strategy_of
from processes.ports import free_ports
from unisono.checkpoints import checkpoint as saving
from unisono.checkpoints import manager as managing
from unisono.errors import CommunicationError

NUM_STEPS = 6
# In which save a worker is killed, and where.
Fate = tuple[int, str]


class Progress:
    num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


class Program:
    """Trains, and saves after every second step."""

    def __init__(self, strategy: uo.MultiWorkerMirroredStrategy, folder: str) -> None:
        self.strategy, self.progress = strategy, Progress()
        torch.manual_seed(1)
        with strategy.scope():
            self.model = nn.Linear(2, 1)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.batches = strategy.experimental_distribute_dataset(list(torch.rand(4, 4, 2)))
        self.manager = uo.experimental.CheckpointManager(
            uo.experimental.Checkpoint(
                model=self.model,
                optimizer=self.optimizer,
                input=self.batches,
                progress=self.progress,
            ),
            folder,
            max_to_keep=None,
        )

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def train(self, save: Callable[[], object], begin: Callable[[], object]) -> bytes:
        while self.progress.num_steps < NUM_STEPS:
            for x in self.batches:
                begin()
                self.strategy.run(self.step, args=(x,))
                self.progress.num_steps += 1
                if self.progress.num_steps % 2 == 0:
                    save()
                if self.progress.num_steps == NUM_STEPS:
                    break
        weights: Tensor = self.model.weight.detach()
        return weights.numpy().tobytes()


def kill_in(where: str, save: Callable[[], object]) -> None:
    """Saves, and ends this process there."""
    state, write = saving.Checkpoint.state, saving.write_file

    def reach(point: str) -> None:
        if point == where:
            os.kill(os.getpid(), signal.SIGKILL)

    def reached_state(*args: Any) -> Any:
        reach("before the state")
        return state(*args)

    def reached_file(*args: Any) -> None:
        reach("before the file")
        write(*args)
        reach("after the file")

    with (
        patch.object(saving.Checkpoint, "state", reached_state),
        patch.object(managing, "write_file", reached_file),
    ):
        save()


def work(
    store: Any, rank: int, size: int, ports: list[int], folder: str, fates: dict[int, Fate]
) -> tuple[bytes, list[str], bytes]:
    strategy = strategy_of(rank, ports, 1, num_replicas=3, elastic=True)
    try:
        program = Program(strategy, folder)
        saves = iter(range(NUM_STEPS))

        def save() -> None:
            at, where = fates.get(rank, (-1, ""))
            kill_in(where if next(saves) == at else "", program.manager.save)

        found = program.train(save, lambda: None)
        files = [os.path.basename(path) for path in program.manager.checkpoints]
        nn.init.zeros_(program.model.weight)
        program.manager.restore_or_initialize()
        return found, files, program.model.weight.detach().numpy().tobytes()
    finally:
        strategy.close()


@pytest.mark.parametrize(
    "fates",
    [
        {0: (0, "before the file"), 2: (1, "before the state")},
        {0: (1, "after the file"), 1: (2, "before the file")},
    ],
    ids=str,
)
def test_those_who_are_left_save_again(tmp_path: Path, fates: dict[int, Fate]) -> None:
    with Ranks(1, work, free_ports(1), str(tmp_path / "alone"), {}) as ranks:
        expected = ranks.results(60)[0]
    with Ranks(3, work, free_ports(3), str(tmp_path / "saved"), fates) as ranks:
        found = ranks.results(100)

    assert found == {rank: expected for rank in range(3) if rank not in fates}
    assert expected[1] == [f"ckpt-{number}.pt" for number in (1, 2, 3)]
    assert expected[0] == expected[2]
    assert not list(tmp_path.glob("saved/.*"))


def fill_the_disk(store: Any, rank: int, size: int, ports: list[int], folder: str) -> list[str]:
    strategy = strategy_of(rank, ports, 1, num_replicas=2, elastic=True)
    told = []
    try:
        program = Program(strategy, folder)
        with patch.object(managing, "write_file", side_effect=OSError("the disk is full")):
            for background in (False, True):
                try:
                    program.manager.save(background=background)
                    program.manager.wait()
                except (OSError, CommunicationError) as error:
                    told.append(f"{type(error).__name__}: {error}")
        program.train(program.manager.save, lambda: None)
        return told
    finally:
        strategy.close()


def test_a_chief_that_cannot_write_is_not_taken_for_lost(tmp_path: Path) -> None:
    with Ranks(2, fill_the_disk, free_ports(2), str(tmp_path)) as ranks:
        told = ranks.results(60)

    assert told[0] == ["OSError: the disk is full"] * 2
    assert told[1] == [
        f"CommunicationError: The chief could not {what}. OSError: the disk is full"
        for what in (f"save a checkpoint in {tmp_path}", "save in the background")
    ]


def train_with_files(desk: Desk, ports: list[int], folder: str) -> Any:
    strategy = strategy_of(0, ports, 1, num_replicas=2, elastic=True)
    job = strategy.extended.elastic
    assert job is not None
    try:
        program = Program(strategy, folder)
        found = program.manager.restore_or_initialize()
        strategy.experimental_admit(program.manager.checkpoint)

        def wait_for_another() -> None:
            if program.progress.num_steps == 3 and len(job.members.met.members) == 1:
                desk.tell("waits")
                deadline = time.monotonic() + 60
                while not job.members.newcomers():
                    assert time.monotonic() < deadline, "nobody came"
                    time.sleep(0.01)

        return found, program.train(program.manager.save, wait_for_another)
    finally:
        strategy.close()


def join_with_files(desk: Desk, ports: list[int], folder: str) -> Any:
    with patch.dict(os.environ, UNISONO_JOIN=f"127.0.0.1:{ports[0]}"):
        return train_with_files(desk, free_ports(1), folder)


def test_a_worker_that_joins_restores_no_file(tmp_path: Path) -> None:
    """It would wait for the others, which do not restore one then."""
    ports = free_ports(1)
    with Crew(2) as crew:
        first, second = crew.members
        first.begin(train_with_files, ports, str(tmp_path))
        assert first.hear(60) == "waits"
        second.begin(join_with_files, ports, str(tmp_path))
        found = first.hear(60), second.hear(60)

    assert found[0] == found[1]
    assert found[0][0] is None
