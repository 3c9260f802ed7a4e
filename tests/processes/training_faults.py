"""What a worker does while a failure comes: it trains a small model, with everything around it."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from worker_threads import communicator_of

import unisono as uo
from processes.crew import Desk
from processes.injections import UNEQUAL, Fault, Injection, Report, reported
from processes.leftovers import Holdings
from unisono.cluster_resolver import ClusterSpec, SimpleClusterResolver
from unisono.experimental import CommunicationImplementation, CommunicationOptions

# Rank 0 serves the store of the job as long as others may come again.
_NOTHING_BUT_THE_STORE = Holdings(descriptors=64, threads=64, segments=0, ports=1)
MOMENTS = ("between steps", "forward", "backward", "reduce", "save")


class Job(NamedTuple):
    """Workers that train together."""

    port: int
    num_replicas: int
    implementation: CommunicationImplementation

    def join(self, rank: int, size: int, seconds: float) -> uo.MultiWorkerMirroredStrategy:
        """Waits for all workers."""
        # Only the first is ever listened at.
        others = [f"127.0.0.1:{number}" for number in range(1, size)]
        spec = ClusterSpec({"worker": [f"127.0.0.1:{self.port}", *others]})
        return uo.MultiWorkerMirroredStrategy(
            SimpleClusterResolver(spec, task_type="worker", task_id=rank),
            # Small packs, so that some travel while the backward pass still runs.
            CommunicationOptions(1 << 10, seconds, self.implementation),
            devices=[f"cpu:{i}" for i in range(self.num_replicas)],
        )


class Training:
    """A model that trains step by step, and says at every moment of a step which one it is."""

    def __init__(
        self, strategy: uo.MultiWorkerMirroredStrategy, at: Callable[[str], None] = lambda _: None
    ) -> None:
        self.strategy = strategy
        self._at = at
        torch.manual_seed(0)
        with strategy.scope():
            self.model = nn.Sequential(
                nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 1)
            )
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.inputs = torch.randn(16, 8)

    def step(self, seen: Tensor | None = None) -> float:
        """Trains, reduces the loss (or `seen` in its place) and looks at what would be saved."""
        self._at("between steps")
        losses = self.strategy.run(self._on_replica)
        self._at("reduce")
        loss = self.strategy.reduce("MEAN", losses if seen is None else seen)
        self._at("save")
        self.model.state_dict()
        return float(loss.sum())

    def _on_replica(self) -> Tensor:
        context = uo.get_replica_context()
        is_first = context is not None and context.local_id == 0
        self.optimizer.zero_grad()
        if is_first:
            self._at("forward")
        hidden = self.model[:3](self.inputs)
        if is_first:
            hidden.register_hook(lambda _: self._at("backward"))
        loss: Tensor = (self.model[3:](hidden) - self.inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def train(desk: Desk, injection: Injection, rank: int, job: Job) -> Report | None:
    """Trains until a failure ends it."""
    made: list[Any] = []

    def body() -> None:
        injection.meet(desk, rank)
        if rank == injection.culprit and injection.fault is Fault.KILLED_AT_START:
            injection.strike(desk)
        strategy = job.join(rank, injection.size, injection.seconds_before)
        made.append(strategy)
        _go_on(desk, injection, strategy, is_culprit=rank == injection.culprit)

    def close() -> None:
        for strategy in made:
            strategy.close()
            strategy.close()
        made.clear()

    # The store of a job that never began is given up with the next job that does.
    began = injection.fault not in (Fault.ABSENT, Fault.KILLED_AT_START)
    return reported(body, close, _NOTHING_BUT_THE_STORE if began else None)


class _Leaves(Exception):
    """What the program of the culprit itself may raise."""


def _go_on(
    desk: Desk,
    injection: Injection,
    strategy: uo.MultiWorkerMirroredStrategy,
    *,
    is_culprit: bool,
) -> None:
    moment = random.Random(injection.seed).choice(MOMENTS)
    now = -1

    def strike(reached: str) -> None:
        if not is_culprit or (now, moment) != (injection.step, reached):
            return
        injection.strike(desk)
        if injection.leaves:
            raise _Leaves
        if injection.fault is Fault.LATE:
            injection.be_late(desk)

    is_unequal = injection.fault in UNEQUAL
    training = Training(strategy, (lambda _: None) if is_unequal else strike)
    end = math.inf
    losses = []
    try:
        for now in itertools.count():
            assert time.monotonic() < end, f"{injection}: the training went on as before"
            other = None
            if now == injection.step:
                end = time.monotonic() + injection.seconds + 20
                communicator_of(strategy).set_timeout(injection.seconds)
            if is_culprit and is_unequal and now == injection.step:
                injection.strike(desk)
                other = _other_value(injection.fault)
            losses.append(training.step(other))
    except _Leaves:
        return
    finally:
        # Until then it has trained, after all the failures before.
        assert len(losses) < 5 or losses[4] < losses[0]


def _other_value(fault: Fault) -> Tensor:
    return torch.ones(3, dtype=torch.float64) if fault is Fault.DTYPE else torch.ones(5)
