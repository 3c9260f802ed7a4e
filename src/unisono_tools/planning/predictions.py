"""Predicts the time of each algorithm on a cluster, and where one overtakes another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from unisono_tools.planning.model import Model
from unisono_tools.pricing import algorithms_for, busiest_share, num_steps, phases_of

# Close enough to find a crossover to a percent.
_SIZES_PER_DECADE = 50
_FIRST_SIZE = 64.0


class Prediction(NamedTuple):
    """The predicted time of an algorithm for one size.

    Attributes:
        algorithm: Its name.
        steps: How many rounds follow each other.
        inside_bytes: What the busiest link inside a host carries.
        between_bytes: What the busiest link between hosts carries.
        seconds: How long it takes.
    """

    algorithm: str
    steps: int
    inside_bytes: float
    between_bytes: float
    seconds: float


class Crossover(NamedTuple):
    """From `num_bytes` on, `to` is the fastest algorithm, and not `fastest_before` any more."""

    num_bytes: float
    fastest_before: str
    to: str
    seconds: float


def predictions(model: Model, num_bytes: float) -> list[Prediction]:
    """Returns the prediction of each algorithm, the fastest first."""
    cluster = model.cluster
    shape = cluster.num_hosts, cluster.ranks_per_host
    rows = []
    for name in algorithms_for(*shape):
        phases = phases_of(name, *shape)
        inside, between = (
            busiest_share(phases, cluster.ranks_per_host, between=flag) * num_bytes
            for flag in (False, True)
        )
        seconds = model.seconds(phases, num_bytes)
        rows.append(Prediction(name, num_steps(phases), inside, between, seconds))
    return sorted(rows, key=lambda row: row.seconds)


def curves(model: Model, sizes: Sequence[float]) -> dict[str, list[float]]:
    """Returns the seconds of each algorithm for each size."""
    shape = model.cluster.num_hosts, model.cluster.ranks_per_host
    return {
        name: [model.seconds(phases_of(name, *shape), size) for size in sizes]
        for name in algorithms_for(*shape)
    }


def sizes_up_to(num_bytes: float) -> list[float]:
    """Returns sizes in equal ratios from a few bytes to `num_bytes`, which is among them."""
    first = min(_FIRST_SIZE, num_bytes)
    count = 2 + round(_SIZES_PER_DECADE * math.log10(num_bytes / first))
    return [first * (num_bytes / first) ** (i / (count - 1)) for i in range(count)]


def crossovers(by_name: dict[str, list[float]], sizes: Sequence[float]) -> list[Crossover]:
    """Returns where the fastest algorithm changes, in the order of sizes."""
    fastest = [min(by_name, key=lambda name: by_name[name][i]) for i in range(len(sizes))]
    return [
        Crossover(sizes[i + 1], before, after, by_name[after][i + 1])
        for i, (before, after) in enumerate(itertools.pairwise(fastest))
        if before != after
    ]
