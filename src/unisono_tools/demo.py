"""Trains a small ConvNet on scikit-learn's handwritten digits: what `unisono demo` shows.

Within a minute on two cores it reaches at least 97 % on digits that it has not seen. The final loss
does not depend on the number of replicas: it is the same for 1, 2 and 4, although the last batch of
an epoch has 37 samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from unisono_tools.processes import one_thread

BATCH_SIZE = 100
NUM_TRAINING = 1437


@dataclass
class Training:
    """The result of one training: a loss and an accuracy per epoch."""

    num_replicas: int
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0


class ConvNet(nn.Sequential):
    """Two convolutions and two linear layers, for 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def load() -> tuple[TensorDataset, TensorDataset]:
    """Returns the digits to learn from, and those to test with."""
    digits = load_digits()
    # float64, so that rounding does not show in the printed digits.
    images = torch.tensor(digits.images / 16.0, dtype=torch.float64).unsqueeze(1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = order[:NUM_TRAINING], order[NUM_TRAINING:]
    training, test = (TensorDataset(images[part], labels[part]) for part in parts)
    return training, test


def train(strategy: uo.Strategy, num_epochs: int, progress: Progress) -> Training:
    """Trains a new model; the only lines about replicas are those with `strategy`."""
    torch.manual_seed(1)
    training, test = load()
    order = torch.Generator().manual_seed(2)
    batches = strategy.experimental_distribute_dataset(
        DataLoader(training, batch_size=BATCH_SIZE, shuffle=True, generator=order)
    )
    test_batches = strategy.experimental_distribute_dataset(DataLoader(test, batch_size=len(test)))
    with strategy.scope():
        model = ConvNet().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    @torch.no_grad()
    def is_right(images: Tensor, labels: Tensor) -> Tensor:
        guesses: Tensor = model(images).argmax(dim=1)
        return (guesses == labels).double()

    result = Training(strategy.num_replicas_in_sync)
    replicas = spelled(result.num_replicas)
    task = progress.add_task(replicas, total=num_epochs * len(batches))
    start = time.perf_counter()
    for _ in range(num_epochs):
        total = 0.0
        for inputs in batches:
            total += float(strategy.reduce("SUM", strategy.run(step, args=inputs), axis=0))
            progress.update(task, advance=1, refresh=True)
        (inputs,) = test_batches
        accuracy = float(strategy.reduce("MEAN", strategy.run(is_right, args=inputs), axis=0))
        result.losses.append(total / NUM_TRAINING)
        result.accuracies.append(accuracy)
        progress.update(task, description=f"{replicas}, {accuracy:6.1%} of test digits")
    result.seconds = time.perf_counter() - start
    return result


def spelled(num_replicas: int) -> str:
    """Returns a number of replicas in words."""
    return f"{num_replicas} replica{'s' if num_replicas > 1 else ''}"


def compare(
    device_lists: Iterable[Sequence[str] | None], num_epochs: int, console: Console
) -> list[Training]:
    """Trains once on each list of devices; None means all GPUs."""
    trainings = []
    with one_thread(), Progress(console=console, auto_refresh=False) as progress:
        for devices in device_lists:
            with closing(uo.MirroredStrategy(devices)) as strategy:
                trainings.append(train(strategy, num_epochs, progress))
    return trainings


def summary(trainings: Sequence[Training]) -> Table:
    """Returns a table with a row per training."""
    table = Table("replicas", "final loss", "test accuracy", "seconds", title="Digits")
    for one in trainings:
        table.add_row(
            str(one.num_replicas),
            f"{one.losses[-1]:.8f}",
            f"{one.accuracies[-1]:.2%}",
            f"{one.seconds:.1f}",
        )
    return table


def draw(trainings: Sequence[Training], path: Path) -> None:
    """Draws loss and accuracy. Later curves are thinner, because they cover the others."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, one in enumerate(trainings):
        width = 7.0 / 2**place
        epochs = range(1, len(one.losses) + 1)
        left.plot(epochs, one.losses, linewidth=width, label=spelled(one.num_replicas))
        right.plot(epochs, one.accuracies, linewidth=width)
    left.set(xlabel="epoch", title="training loss", yscale="log")
    right.set(xlabel="epoch", title="accuracy on unseen digits")
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    right.axhline(0.97, color="gray", linewidth=1, linestyle=":")
    left.legend()
    figure.savefig(path, dpi=120)
