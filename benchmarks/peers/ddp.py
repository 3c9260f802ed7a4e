"""DistributedDataParallel over Gloo, one process a replica, commanded over pipes."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from peers.models import CASES, train_step

DEADLINE_S = 120.0


class Ddp:
    """Two or more worker processes, asked to prepare a case and to take steps of it."""

    def __init__(self, num_replicas: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-benchmark-")
        context = multiprocessing.get_context("spawn")
        meeting_point = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._workers = []
        for rank in range(num_replicas):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_work, args=(rank, num_replicas, meeting_point, theirs), daemon=True
            )
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)

    def prepare(self, case: str, seed: int, num_steps: int) -> list[float]:
        """Builds the model of a case; returns the mean loss of each of its first steps."""
        answers = self._ask(("prepare", case, seed, num_steps))
        return [sum(losses) / len(losses) for losses in zip(*answers, strict=True)]

    def steps(self, num_steps: int) -> None:
        """Takes steps, and returns when all workers have."""
        self._ask(("steps", num_steps))

    def close(self) -> None:
        """Ends the workers, those that do not answer too."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(("end",))
        for worker in self._workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.kill()
                worker.join(timeout=10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _ask(self, command: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_S):
                raise TimeoutError(
                    f"DDP's rank {rank} did not answer {command[0]!r} in {DEADLINE_S:g} s."
                )
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"DDP's rank {rank} died in {command[0]!r}.") from None
        return answers


def _work(rank: int, num_replicas: int, meeting_point: str, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=num_replicas,
        timeout=datetime.timedelta(seconds=DEADLINE_S),
    )
    try:
        _serve(rank, pipe)
    except EOFError:
        pass  # The benchmark is gone.
    finally:
        distributed.destroy_process_group()


def _serve(rank: int, pipe: Connection) -> None:
    model, optimizer, batch = None, None, None
    while True:
        command, *arguments = pipe.recv()
        if command == "end":
            return
        if command == "prepare":
            name, seed, num_steps = arguments
            case = CASES[name]
            torch.manual_seed(seed)
            model = DistributedDataParallel(case.make_model())
            optimizer = case.optimizer(model)
            batch = case.batch(rank)
            pipe.send([float(train_step(model, optimizer, batch)) for _ in range(num_steps)])
        else:
            assert model is not None
            assert optimizer is not None
            assert batch is not None
            for _ in range(arguments[0]):
                train_step(model, optimizer, batch)
            pipe.send(None)
