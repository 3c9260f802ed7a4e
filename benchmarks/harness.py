"""What the benchmarks share: competitors taken in turn, medians, ratios, tables, machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

Work: TypeAlias = Callable[[], object]

_MIN_BLOCK_S = 2e-3
# The threads of an OpenMP runtime spin for a while after their work. They must not take a core from
# the next in turn.
REST_S = 5e-3


def interleaved_medians(works: Mapping[str, Work], *, budget_s: float) -> dict[str, float]:
    """Returns the median seconds of each work; all are run in turn until the budget is spent.

    Turns make a noisy machine disturb all competitors alike. A rest between them keeps one from
    disturbing the next, and a first call that does not count brings back what its caches lost.
    Work that takes less than two milliseconds is repeated within its turn.
    """
    repeats = {name: _repeats(work) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, work in works.items():
            time.sleep(REST_S)
            work()
            times[name].append(_seconds(work, repeats[name]))
    return {name: statistics.median(series) for name, series in times.items()}


def _repeats(work: Work) -> int:
    quickest = min(_seconds(work, 1) for _ in range(4))
    return max(1, int(_MIN_BLOCK_S / max(quickest, 1e-7)))


def _seconds(work: Work, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def machine() -> dict[str, Any]:
    """Returns what a number must be read with."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def write_json(path: Path, command: str, rows: list[dict[str, Any]]) -> None:
    """Writes rows with the command and the machine they come from."""
    content = {"command": command, "machine": machine(), "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")


def spell_bytes(num_bytes: float) -> str:
    """Returns bytes as people say them: 4 KB, 256 MB."""
    for unit, size in (("MB", 2**20), ("KB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes:g} B"


def parse_bytes(text: str) -> int:
    """Returns the bytes of a text such as 64, 4K or 256M."""
    units = {"K": 2**10, "M": 2**20}
    return int(text.rstrip("KM")) * units.get(text[-1:], 1)
