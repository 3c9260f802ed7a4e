"""Workers of `MultiWorkerMirroredStrategy`, one process each, as `unisono launch` starts them."""

from __future__ import annotations

from contextlib import ExitStack, closing
from multiprocessing.connection import Connection

import torch
from torch import Tensor

import unisono as uo
from unisono.cluster_resolver import SimpleClusterResolver
from unisono_tools.benchmarks.peers.crew import DEADLINE_S
from unisono_tools.benchmarks.peers.models import Case, train_step
from unisono_tools.benchmarks.peers.trainers import Step, Trainers, serve_steps
from unisono_tools.processes import free_ports


class Workers(Trainers):
    """Two or more workers with one CPU replica each, which share memory."""

    def __init__(self, num_workers: int) -> None:
        super().__init__("workers", num_workers, _work, free_ports(num_workers))


def _work(rank: int, num_workers: int, pipe: Connection, ports: list[int]) -> None:
    torch.set_num_threads(1)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=rank)
    options = uo.experimental.CommunicationOptions(timeout_seconds=DEADLINE_S)
    with ExitStack() as strategies:

        def build(case: Case, seed: int) -> Step:
            # The memory that a model shared goes with its strategy.
            strategies.close()
            strategy = strategies.enter_context(
                closing(uo.MultiWorkerMirroredStrategy(resolver, options, devices=["cpu:0"]))
            )
            torch.manual_seed(seed)
            with strategy.scope():
                model = case.make_model()
                optimizer = case.optimizer(model)
            batch = case.batch(rank)

            def step() -> Tensor:
                loss: Tensor = strategy.run(lambda: train_step(model, optimizer, batch))
                return loss

            return step

        serve_steps(pipe, build)
