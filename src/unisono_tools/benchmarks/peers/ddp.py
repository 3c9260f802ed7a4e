"""DistributedDataParallel, one process per replica, over a backend of torch.distributed."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from unisono_tools.benchmarks.peers.crew import DEADLINE_S
from unisono_tools.benchmarks.peers.models import Case, train_step
from unisono_tools.benchmarks.peers.trainers import Step, Trainers, serve_steps


class Ddp(Trainers):
    """Two or more processes under DDP.

    Args:
        num_replicas: How many.
        backend: "gloo" or "unisono".
    """

    def __init__(self, num_replicas: int, backend: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-benchmark-")
        meeting_point = str(Path(self._folder.name) / "store")
        super().__init__(f"DDP over {backend}", num_replicas, _work, meeting_point, backend)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def _work(rank: int, num_replicas: int, pipe: Connection, meeting_point: str, backend: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group(
        backend,
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=num_replicas,
        timeout=timedelta(seconds=DEADLINE_S),
    )

    def build(case: Case, seed: int) -> Step:
        torch.manual_seed(seed)
        model = DistributedDataParallel(case.make_model())
        optimizer = case.optimizer(model)
        batch = case.batch(rank)
        return lambda: train_step(model, optimizer, batch)

    try:
        serve_steps(pipe, build)
    finally:
        distributed.destroy_process_group()
