"""A training step with several replicas on one GPU, against plain torch.

    python benchmarks/gpu_training_step.py                 # both models, 1, 2 and 4 replicas

Replicas on virtual GPUs share the real one, so the best that R replicas can do is the compute of R
forward and backward passes and one update. `limit` is that, through plain torch, with the same
batches; all are taken in turn, timed with device events, and numbers are medians. Before that, one
step from the same weights must leave the weights that plain torch has after the mean gradient.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from harness import write_json
from peers import gpu_models
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import unisono as uo

Batch = tuple[Tensor, Tensor]
Work = Callable[[], object]


class Case(NamedTuple):
    """A model, and one replica's batch."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[..., Batch]
    batch_size: int


CASES = {
    "ResNet-50": Case(gpu_models.resnet50, gpu_models.images, 256),
    "GPT-2 small": Case(gpu_models.Gpt2, gpu_models.texts, 16),
}


def forward_backward(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss.detach()


class Plain:
    """The compute of R replicas and one update, with nothing between them."""

    def __init__(self, case: Case, batches: Sequence[Batch]) -> None:
        torch.manual_seed(0)
        self.model = case.make_model().cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batches = batches

    def step(self) -> None:
        for batch in self.batches:
            self.optimizer.zero_grad()
            forward_backward(self.model, batch)
        self.optimizer.step()

    def step_with_mean(self) -> None:
        self.optimizer.zero_grad()
        for batch in self.batches:
            forward_backward(self.model, batch)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(self.batches)
        self.optimizer.step()


class Unisono:
    """R replicas on virtual GPUs."""

    def __init__(self, case: Case, batches: Sequence[Batch]) -> None:
        devices = [f"cuda:{i}" for i in range(len(batches))]
        self.strategy = uo.MirroredStrategy(devices)
        torch.manual_seed(0)
        with self.strategy.scope():
            self.model = case.make_model()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batch = [uo.PerReplica(parts, devices) for parts in zip(*batches, strict=True)]

    def step(self) -> None:
        self.strategy.run(self._replica_step, args=self.batch)

    def _replica_step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = forward_backward(self.model, (inputs, labels))
        self.optimizer.step()
        return loss


def interleaved(works: dict[str, Work], *, rounds: int, steps: int) -> dict[str, float]:
    """Returns the median milliseconds of each, all taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            work()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(steps):
                work()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / steps)
    return {name: statistics.median(series) for name, series in times.items()}


def largest_difference(case: Case, batches: Sequence[Batch]) -> float:
    """Returns by how much the weights differ after a step, in parts of how far they went."""
    plain, ours = Plain(case, batches), Unisono(case, batches)
    start = [parameter.detach().clone() for parameter in plain.model.parameters()]
    plain.step_with_mean()
    ours.step()
    ours.strategy.close()
    pairs = zip(start, plain.model.parameters(), ours.model.parameters(), strict=True)
    moved, apart = 0.0, 0.0
    with torch.no_grad():
        for before, expected, found in pairs:
            moved += float((expected - before).double().square().sum())
            apart += float((expected - found).double().square().sum())
    return math.sqrt(apart / moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    todo = [(name, replicas) for name in options.models for replicas in options.replicas]
    with Progress(transient=True) as progress:
        for name, replicas in progress.track(todo):
            with uo.testing.virtual_gpus(replicas):
                case = CASES[name]
                torch.manual_seed(replicas)
                batches = [case.make_batch(case.batch_size, device="cuda") for _ in range(replicas)]
                difference = largest_difference(case, batches)
                if difference > 0.02:
                    raise SystemExit(f"{name}, {replicas} replicas: {difference:.3g} apart.")
                plain, ours = Plain(case, batches), Unisono(case, batches)
                works: dict[str, Work] = {"limit": plain.step, "unisono": ours.step}
                times = interleaved(works, rounds=options.rounds, steps=options.steps)
                ours.strategy.close()
            rows.append({"model": name, "replicas": replicas, "apart": difference, **times})
    table = Table("model", "replicas", "limit ms", "unisono ms", "unisono / limit", "apart")
    for row in rows:
        ratio = row["unisono"] / row["limit"]
        times_shown = f"{row['limit']:.2f}", f"{row['unisono']:.2f}", f"{ratio:.3f}"
        table.add_row(row["model"], str(row["replicas"]), *times_shown, f"{row['apart']:.1e}")
    Console(width=100).print(table)
    if options.json:
        write_json(options.json, "python benchmarks/gpu_training_step.py", rows)


if __name__ == "__main__":
    main()
