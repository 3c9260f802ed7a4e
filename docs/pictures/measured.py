"""Measured reductions, from docs/measurements, drawn as `unisono bench` draws them."""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.figure import Figure

from unisono_tools.benchmarks.all_reduce import AllReduceSweep
from unisono_tools.benchmarks.reduce import BATCHES, ReduceSweep
from unisono_tools.benchmarks.rows import Row, Sweep

FOLDER = Path(__file__).parents[1] / "measurements"


def draw_all_reduce() -> Figure:
    """Latencies on the machine with two cores."""
    return _draw(AllReduceSweep(), "all_reduce", ["size", "ranks", "memory"])


def draw_reduce() -> Figure:
    """Speeds relative to a chain of torch additions on the same machine."""
    return _draw(ReduceSweep(), "reduce", ["case", "replicas", "into"])


def _draw(sweep: Sweep, name: str, case: list[str]) -> Figure:
    figure = Figure(layout="constrained")
    sweep.draw(figure, read_rows(FOLDER / f"{name}.csv", case))
    return figure


def read_rows(path: Path, case: list[str]) -> list[Row]:
    """Returns the rows of a table: the columns of `case`, the time, a rate, and ratios."""
    rows = []
    for line in csv.DictReader(path.read_text().splitlines()):
        size, numbers, kind = (line.pop(name) for name in case)
        # The pictures have no place for lists of tensors.
        if size in BATCHES:
            continue
        own = float(line.pop("microseconds")) / 1e6
        rates = {unit: float(line.pop(unit)) for unit in list(line) if unit.endswith("GB/s")}
        ratios = {name: float(ratio) for name, ratio in line.items() if ratio}
        described = dict(zip(case, (size, int(numbers), kind), strict=True))
        rows.append(Row(described, _num_bytes(size), [own], rates, ratios))
    return rows


def _num_bytes(size: str) -> int:
    number, _, unit = size.partition(" ")
    return int(number) * {"B": 1, "KB": 2**10, "MB": 2**20}[unit]
