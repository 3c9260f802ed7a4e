"""`unisono demo`: trains on digits, with the same loss for any number of replicas."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unisono_tools.cli.extras import require
from unisono_tools.cli.parameters import ListCommand, OutputPath

if TYPE_CHECKING:
    from unisono_tools.demo import Training


@click.command(cls=ListCommand)
@click.option(
    "--replicas",
    metavar="R...",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 2, 4),
    show_default="1 2 4",
    help="Numbers of CPU replicas to compare.",
)
@click.option(
    "--all-devices", is_flag=True, help="Use all GPUs instead, or one CPU replica per core."
)
@click.option(
    "--epochs",
    metavar="N",
    type=click.IntRange(min=1),
    default=15,
    show_default=True,
    help="Number of epochs.",
)
@click.option(
    "--plot",
    metavar="FILE",
    type=OutputPath(".png", ".svg", ".pdf"),
    default="digits.png",
    show_default=True,
    help="Draw the curves into FILE.",
)
def demo(
    *, replicas: tuple[int, ...], all_devices: bool, epochs: int, plot: Path
) -> list[Training]:
    """Trains on the handwritten digits of scikit-learn.

    Trains a small ConvNet with 1, 2 and 4 replicas in turn, each within a minute on two cores. It
    reaches 97 % accuracy on unseen digits, with the same final loss every time. The exit status is
    1 if the losses differ, and 3 if a package is missing.
    """
    require("demo", "rich", "sklearn", "matplotlib")
    import torch
    from rich.console import Console

    from unisono_tools.demo import compare, draw, summary

    console = Console()
    every = [None if torch.cuda.is_available() else _cpus(os.cpu_count() or 1)]
    trainings = compare(every if all_devices else map(_cpus, replicas), epochs, console)
    console.print(summary(trainings))
    draw(trainings, plot)
    console.print(f"The curves are in {plot}.")
    _check(trainings)
    return trainings


def _cpus(num_replicas: int) -> list[str]:
    return [f"cpu:{i}" for i in range(num_replicas)]


def _check(trainings: Sequence[Training]) -> None:
    """Fails if the loss depends on the number of replicas."""
    losses = [training.losses[-1] for training in trainings]
    if any(not math.isclose(loss, losses[0], rel_tol=1e-6) for loss in losses):
        raise click.ClickException(
            f"The final losses should be equal, but they are {losses}. Please report this."
        )
