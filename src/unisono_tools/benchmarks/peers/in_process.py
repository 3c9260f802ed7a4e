"""Trainings within this process: that of Unisono, and one that nobody can beat."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import unisono as uo
from unisono_tools.benchmarks.peers.crew import DEADLINE_S
from unisono_tools.benchmarks.peers.models import Case, train_step


class Mirrored:
    """A case under `MirroredStrategy`; its step may be captured."""

    def __init__(
        self, case: Case, num_replicas: int, seed: int, *, is_captured: bool = False
    ) -> None:
        self._strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        torch.manual_seed(seed)
        with self._strategy.scope():
            model = case.make_model()
            optimizer = case.optimizer(model)
        batches = [case.batch(i) for i in range(num_replicas)]
        self._batch = tuple(uo.PerReplica(parts) for parts in zip(*batches, strict=True))

        def step(inputs: Tensor, labels: Tensor) -> Tensor:
            return train_step(model, optimizer, (inputs, labels))

        self._step: Callable[..., Tensor] = uo.function(step) if is_captured else step

    def losses(self, num_steps: int) -> list[float]:
        """Takes steps, and returns the mean loss of the replicas at each."""
        strategy = self._strategy
        return [
            float(strategy.reduce(uo.ReduceOp.MEAN, strategy.run(self._step, args=self._batch)))
            for _ in range(num_steps)
        ]

    def steps(self, num_steps: int) -> None:
        """Takes steps."""
        for _ in range(num_steps):
            self._strategy.run(self._step, args=self._batch)

    def close(self) -> None:
        """Ends the replicas."""
        self._strategy.close()


class Apart:
    """Copies of the model in separate threads, which never wait for each other."""

    def __init__(self, case: Case, num_replicas: int) -> None:
        self._threads = ThreadPoolExecutor(
            num_replicas, initializer=torch.set_num_threads, initargs=(1,)
        )
        models = [case.make_model() for _ in range(num_replicas)]
        self._copies = [
            (model, case.optimizer(model), case.batch(i)) for i, model in enumerate(models)
        ]

    def steps(self, num_steps: int) -> None:
        """Takes steps in every thread."""

        def work(copy: Any) -> None:
            # As on a replica: backward runs on this thread.
            with torch.autograd.set_multithreading_enabled(False):
                for _ in range(num_steps):
                    train_step(*copy)

        list(self._threads.map(work, self._copies, timeout=DEADLINE_S))

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(cancel_futures=True)
