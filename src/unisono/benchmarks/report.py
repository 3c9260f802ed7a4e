"""A sweep on the terminal and in files: progress bar, table, picture and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from unisono.benchmarks.rows import Row, Sweep, machine


def run(sweep: Sweep, console: Console) -> list[Row]:
    """Measures everything, with a bar that moves at every measurement."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    rows: list[Row] = []
    # A thread that draws would disturb what is measured.
    with (
        Progress(*columns, console=console, auto_refresh=False) as progress,
        closing(sweep.measurements()) as measurements,
    ):
        task = progress.add_task(sweep.name, total=sweep.num_measurements)
        for measured in measurements:
            rows += measured
            progress.update(task, advance=1, refresh=True)
    return rows


def print_table(sweep: Sweep, rows: Sequence[Row], console: Console) -> None:
    """Prints all rows. A terminal that is too narrow breaks lines, and loses no number."""
    here = machine()
    title = f"{sweep.name}: {here['cpu']}, {here['cores']} cores, {here['kernel']}"
    peers = list(dict.fromkeys(name for row in rows for name in row.ratios))
    table = Table(
        title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, caption=_caption(sweep)
    )
    table.caption_justify = table.title_justify = "left"
    for name in rows[0].case:
        table.add_column(name, no_wrap=True)
    for name in [*rows[0].seconds, *rows[0].rates, *peers]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *map(str, row.case.values()),
            *map(spell_seconds, row.seconds.values()),
            *map(_spell_rate, row.rates.values()),
            *(f"{row.ratios[name]:.2f}" if name in row.ratios else "" for name in peers),
        )
    console.width = max(
        console.width,
        console.measure(table, options=console.options.update(max_width=1000)).maximum,
    )
    console.print(table)
    if summary := sweep.summary(rows):
        console.print(f"\n{summary}")


def _caption(sweep: Sweep) -> str:
    ratios = "The last columns are ratios: how many times the median of unisono each needs."
    return "\n".join([ratios, *(f"Left out: {peer}." for peer in sweep.left_out)])


def spell_seconds(seconds: float) -> str:
    """Returns a time in three digits and the unit that fits: 1.25 us, 34.2 ms."""
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _spell_rate(rate: float) -> str:
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def as_json(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Returns the rows with the sweep and the machine they come from."""
    content: dict[str, Any] = {
        "sweep": vars(sweep),
        "machine": machine(),
        "left_out": list(sweep.left_out),
        "rows": [row.as_json() for row in rows],
    }
    return json.dumps(content, indent=1)


def save_picture(sweep: Sweep, rows: Sequence[Row], path: Path) -> None:
    """Draws the rows into a file. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    sweep.draw(figure, rows)
    figure.savefig(path, dpi=120)
