"""Kills and starts workers while they train on digits: what `unisono demo --elastic` shows.

Three workers share six replicas. Two of them are killed and two others join. At the end the weights
equal, to the bit, those of a run in one process that nobody has disturbed.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import unisono as uo
from unisono_tools.demo import BATCH_SIZE, ConvNet, load
from unisono_tools.processes import free_ports, one_thread, quick_processes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_REPLICAS = 6
NUM_WORKERS = 3
# What happens, in which part of the training, and to which worker.
EVENTS = ((0.15, "kill", 2), (0.3, "start", 3), (0.55, "kill", 0), (0.65, "start", 4))
# So that one can watch, and a worker that joins comes in time.
_SECONDS_PER_STEP = 0.15
_PATIENCE_SECONDS = 300.0


@dataclass
class Elastic:
    """What has happened.

    Attributes:
        undisturbed: The loss of every step in one process.
        losses: The loss of every step in the job that lost workers.
        layout: For every step, which worker ran each replica.
        weights: Fingerprints of the final weights: of the undisturbed run, and of those who ended.
        failed: The workers that ended with an error, which they have printed.
    """

    undisturbed: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    layout: dict[int, dict[int, int]] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    @property
    def are_equal(self) -> bool:
        """Whether all weights and losses have the same bits."""
        same_losses = all(self.undisturbed[step] == loss for step, loss in self.losses.items())
        return len(self.weights) > 1 and len(set(self.weights)) == 1 and same_losses


class Training:
    """A program that workers can leave and join at any time."""

    def __init__(self, strategy: uo.MultiWorkerMirroredStrategy, num_epochs: int) -> None:
        self._strategy, self._num_epochs = strategy, num_epochs
        self._epoch = self._num_steps = 0
        torch.manual_seed(1)
        with strategy.scope():
            self._model = ConvNet()
            self._optimizer = torch.optim.Adam(self._model.parameters(), lr=3e-3)
        loader = DataLoader(load()[0], batch_size=BATCH_SIZE, shuffle=True)
        self._batches = strategy.experimental_distribute_dataset(loader)
        self.checkpoint = uo.experimental.Checkpoint(
            model=self._model, optimizer=self._optimizer, input=self._batches, progress=self
        )

    def state_dict(self) -> dict[str, int]:
        """Where in the loop this worker is."""
        return {"epoch": self._epoch, "num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where the others are."""
        self._epoch, self._num_steps = state["epoch"], state["num_steps"]

    def train(self, tell: Callable[[int, float, list[int]], None]) -> str:
        """Tells of every step its loss and the replicas that ran here; returns a fingerprint."""
        while self._epoch < self._num_epochs:
            for batch in self._batches:
                loss, replica = self._strategy.run(self._step, args=batch)
                replicas = map(int, self._strategy.experimental_local_results(replica))
                tell(self._num_steps, float(self._strategy.reduce("MEAN", loss)), list(replicas))
                self._num_steps += 1
            self._epoch += 1
        bits = b"".join(one.numpy().tobytes() for one in self._model.state_dict().values())
        return hashlib.sha256(bits).hexdigest()

    def _step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._model(images.float()), labels)
        loss.backward()
        self._optimizer.step()
        context = uo.get_replica_context()
        assert context is not None
        return loss.detach(), torch.tensor(context.replica_id_in_sync_group)


def work(pipe: Connection, addresses: list[str], worker: int, num_epochs: int) -> None:
    """What a worker does."""
    torch.set_num_threads(1)
    # What it logs would break the table.
    logging.getLogger("unisono").setLevel(logging.ERROR)

    def tell(step: int, loss: float, replicas: list[int]) -> None:
        pipe.send((step, loss, replicas))
        time.sleep(_SECONDS_PER_STEP)

    with closing(_strategy(addresses, worker, elastic=True)) as strategy:
        training = Training(strategy, num_epochs)
        strategy.experimental_admit(training.checkpoint)
        pipe.send(training.train(tell))


def _strategy(
    addresses: list[str], worker: int, *, elastic: bool
) -> uo.MultiWorkerMirroredStrategy:
    return uo.MultiWorkerMirroredStrategy(
        uo.cluster_resolver.SimpleClusterResolver(
            {"worker": addresses}, task_type="worker", task_id=worker
        ),
        devices=["cpu:0"],
        num_replicas=NUM_REPLICAS,
        elastic=elastic,
    )


class Show:
    """Starts and kills workers, and shows what they do."""

    def __init__(self, num_epochs: int, console: Console) -> None:
        self.found = Elastic()
        self._num_epochs, self._console = num_epochs, console
        self._states = dict.fromkeys(range(NUM_WORKERS + 2), "")
        self._addresses = [f"127.0.0.1:{port}" for port in free_ports(len(self._states))]
        self._context = quick_processes("torch._dynamo", __name__)
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[Connection, int] = {}

    def play(self) -> Elastic:
        """Trains undisturbed, and then with workers that come and go."""
        found = self.found
        with one_thread(), closing(_strategy(["127.0.0.1:1"], 0, elastic=False)) as one:
            training = Training(one, self._num_epochs)
            found.weights.append(training.train(lambda _, loss, __: found.undisturbed.append(loss)))
        try:
            with Live(self._table(), console=self._console) as live:
                self._go_on(live)
        finally:
            for process in self._processes.values():
                process.kill()
                process.join()
        return found

    def _go_on(self, live: Live) -> None:
        for worker in range(NUM_WORKERS):
            self._start(worker)
        found = self.found
        num_steps = len(found.undisturbed)
        coming = [(round(part * num_steps), kind, worker) for part, kind, worker in EVENTS]
        while any(state in ("starts", "trains") for state in self._states.values()):
            ready = wait(list(self._pipes), _PATIENCE_SECONDS)
            if not ready:
                raise RuntimeError(
                    f"The workers have said nothing for {_PATIENCE_SECONDS:g} s. Try again when "
                    "the machine is less busy."
                )
            for pipe in list(self._pipes):
                if pipe in ready:
                    self._hear(pipe)
            while coming and coming[0][0] <= max(found.losses, default=-1):
                _, kind, worker = coming.pop(0)
                if kind == "kill":
                    self._processes[worker].kill()
                    self._states[worker] = "was killed"
                else:
                    self._start(worker)
            live.update(self._table())

    def _start(self, worker: int) -> None:
        pipe, theirs = self._context.Pipe(duplex=False)
        known = self._addresses[: max(NUM_WORKERS, worker + 1)]
        process = self._context.Process(target=work, args=(theirs, known, worker, self._num_epochs))
        process.start()
        theirs.close()
        self._processes[worker], self._pipes[pipe] = process, worker
        self._states[worker] = "starts" if worker < NUM_WORKERS else "wants to join"

    def _hear(self, pipe: Connection) -> None:
        found, worker = self.found, self._pipes[pipe]
        try:
            told = pipe.recv()
        except (EOFError, ConnectionError):
            del self._pipes[pipe]
            if self._states[worker] not in ("was killed", "is done"):
                self._states[worker] = "has failed"
                found.failed.append(worker)
            return
        if isinstance(told, str):
            found.weights.append(told)
            self._states[worker] = "is done"
            return
        step, loss, replicas = told
        found.losses[step] = loss
        found.layout.setdefault(step, {}).update(dict.fromkeys(replicas, worker))
        if self._states[worker] != "was killed":
            self._states[worker] = "trains"

    def _table(self) -> Table:
        found = self.found
        step = max(found.losses, default=-1)
        table = Table("worker", "", "replicas", title=f"{NUM_REPLICAS} replicas, elastic=True")
        last = found.layout.get(step - 1, {}) | found.layout.get(step, {})
        for worker, state in self._states.items():
            own = [str(one) for one, by in sorted(last.items()) if by == worker]
            table.add_row(str(worker), state, " ".join(own) if state == "trains" else "")
        if step >= 0:
            table.caption = (
                f"step {step + 1} of {len(found.undisturbed)}: loss {found.losses[step]:.10f}, "
                f"undisturbed {found.undisturbed[step]:.10f}"
            )
        return table


def draw_elastic(found: Elastic, path: Path) -> None:
    """Draws what has happened into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    paint(found, figure)
    figure.savefig(path, dpi=120)


def paint(found: Elastic, figure: Figure) -> None:
    """Draws the losses on top of each other, and who ran which replica."""
    figure.clear()
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(found.undisturbed, linewidth=6, color="lightgray", label="undisturbed")
    steps = sorted(found.losses)
    top.plot(steps, [found.losses[step] for step in steps], linewidth=1, label="lost workers")
    top.set(title="loss", yscale="log")
    top.legend()
    for worker in sorted({one for ran in found.layout.values() for one in ran.values()}):
        cells = [
            (step, replica)
            for step, ran in found.layout.items()
            for replica, by in ran.items()
            if by == worker
        ]
        bottom.scatter(*zip(*cells, strict=True), marker="s", s=14, label=f"worker {worker}")
    bottom.set(xlabel="step", ylabel="replica", title="who ran which replica")
    if found.layout:
        bottom.legend(loc="center left", bbox_to_anchor=(1, 0.5))
