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

from unisono_tools.benchmarks.rows import Row, Sweep, machine
from unisono_tools.tables import spell_seconds


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
    """Prints all rows. Columns that do not fit the console follow in another table."""
    here = machine()
    console.print(f"{sweep.name}: {here['cpu']}, {here['cores']} cores, {here['kernel']}")
    columns = _columns(rows)
    while columns:
        table = _table(rows, columns)
        count = len(columns)
        while count > 1 and _width(table, console) > console.width:
            count -= 1
            table = _table(rows, columns[:count])
        console.print(table)
        columns = columns[count:]
    console.print(_caption(sweep))
    if summary := sweep.summary(rows):
        console.print(f"\n{summary}")


# A heading, and a cell per row.
_Column = tuple[str, list[str]]


def _columns(rows: Sequence[Row]) -> list[_Column]:
    """The columns that hold numbers: the times, the rates and the ratios."""
    peers = list(dict.fromkeys(name for row in rows for name in row.ratios))
    return [
        *((name, [spell_seconds(row.seconds[name]) for row in rows]) for name in rows[0].seconds),
        *((name, [_spell_rate(row.rates[name]) for row in rows]) for name in rows[0].rates),
        *(
            (name, [f"{r.ratios[name]:.2f}" if name in r.ratios else "" for r in rows])
            for name in peers
        ),
    ]


def _table(rows: Sequence[Row], columns: Sequence[_Column]) -> Table:
    """A table that begins with what was measured in each row."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in rows[0].case:
        table.add_column(name, no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*map(str, row.case.values()), *(cells[number] for _, cells in columns))
    return table


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=1000)).maximum


def _caption(sweep: Sweep) -> str:
    ratios = "Columns named after a competitor hold its median time divided by Unisono's."
    return "\n".join([ratios, *(f"Left out: {peer}." for peer in sweep.left_out)])


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
