"""What a sweep gives: rows, each with the times of Unisono and the ratios of its competitors."""

from __future__ import annotations

import datetime
import math
import os
import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from unisono.kernels import native_core
from unisono_tools.benchmarks.timing import Series, percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        case: What was measured, by column.
        num_bytes: What one replica or rank brings.
        turns: The seconds of Unisono, a number a turn.
        rates: What Unisono does in a second, by unit, at its median.
        ratios: How many times the median of Unisono each competitor needs.
    """

    case: Mapping[str, str | int]
    num_bytes: int
    turns: Sequence[float]
    rates: Mapping[str, float]
    ratios: Mapping[str, float]

    @staticmethod
    def compare(
        case: Mapping[str, str | int],
        num_bytes: int,
        own: Series,
        others: Mapping[str, Series],
        rates: Callable[[float], Mapping[str, float]],
    ) -> Row:
        """Makes a row of the turns of all competitors; `rates` are those at a number of seconds."""
        median = percentile(own, 50)
        ratios = {name: percentile(series, 50) / median for name, series in others.items()}
        return Row(case, num_bytes, own, rates(median), ratios)

    @property
    def seconds(self) -> dict[str, float]:
        """The least, the median, the 99th percentile and the most."""
        percents = {"min": 0, "p50": 50, "p99": 99, "max": 100}
        return {name: percentile(self.turns, percent) for name, percent in percents.items()}

    def as_json(self) -> dict[str, Any]:
        """The row for a file."""
        return {
            **self.case,
            "bytes": self.num_bytes,
            "turns": len(self.turns),
            "seconds": self.seconds,
            "rates": dict(self.rates),
            "ratios": dict(self.ratios),
        }


class Sweep(Protocol):
    """Measurements, of which each gives some rows."""

    @property
    def name(self) -> str:
        """What the progress bar and the table call it."""

    @property
    def num_measurements(self) -> int:
        """How often `measurements` yields."""

    @property
    def left_out(self) -> Sequence[str]:
        """The competitors that do not take part, each with what to do about it."""

    def measurements(self) -> Generator[Sequence[Row], None, None]:
        """Measures, and yields the rows of each measurement.

        Raises:
            BenchmarkError: if a result is wrong or a competitor fails.
            UnsupportedError: if this machine cannot do what is asked.
        """

    def summary(self, rows: Sequence[Row]) -> str:
        """Returns a text to print below the table, or nothing."""

    def draw(self, figure: Figure, rows: Sequence[Row]) -> None:
        """Draws the rows into an empty figure."""


def machine() -> dict[str, Any]:
    """Returns what a number must be read with."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    models = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.processor()),
        "cores": os.cpu_count(),
        "kernel": native_core().status,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def spell_bytes(num_bytes: float) -> str:
    """Returns bytes as people say them: 4 KB, 256 MB."""
    for unit, size in (("MB", 2**20), ("KB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes:g} B"


def mark_sizes(axis: Axes, most: int = 7) -> None:
    """Labels a logarithmic axis of sizes with sizes: 4 KB, 64 KB, 1 MB."""
    mark_powers_of_two(axis.xaxis, spell_bytes, most)


def mark_powers_of_two(axis: Axis, spell: Callable[[float], str], most: int = 7) -> None:
    """Labels a logarithmic axis at powers of two, at `most` of them, and nowhere else."""
    low, high = axis.get_view_interval()
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    if last <= first:
        # Marks beyond its ends widen the axis.
        first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    powers = range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))
    axis.set_ticks([2.0**power for power in powers], [spell(2.0**power) for power in powers])
    axis.set_ticks([], minor=True)
