"""What `unisono tune` does: it measures, fits, writes the file, and prints what changed."""

from __future__ import annotations

import datetime
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import click

from unisono.cluster import Membership, detect, open_store
from unisono.costs import Link, Tuning, read_tuning, tuning_path
from unisono.costs.tuning import LINKS, this_machine_in_words
from unisono.errors import TuningError, UnisonoError
from unisono.kernels import native_core
from unisono.system import TUNING
from unisono_tools.tables import (
    LINK_NAMES,
    change_in_words,
    show_table,
    spell_bytes,
    spell_rate,
    spell_seconds,
)
from unisono_tools.tuning.measured import Measured, errors_between, fitted, runs_of
from unisono_tools.tuning.rank_sweeps import cluster_sweep, leave, local_rank_sweeps, rank_sweeps
from unisono_tools.tuning.sweeps import local_sweep

_TIMEOUT_SECONDS = 60.0


class Extent(NamedTuple):
    """What to measure: the sizes, and how long to measure each."""

    sizes: Sequence[int]
    seconds: float


FULL = Extent([2**power for power in range(8, 25)], 0.15)
QUICK = Extent([2**power for power in range(10, 23)], 0.03)


def tune_here_or_cluster(num_ranks: int | None, output: Path | None, *, quick: bool) -> None:
    """Measures this host, or the cluster if a launcher started this, and writes the file.

    Args:
        num_ranks: The number of processes of this host, if there is no launcher.
        output: The file to write, if not the one in the user's cache.
        quick: Whether to measure fewer sizes, and each for a shorter time.
    """
    try:
        extent = QUICK if quick else FULL
        membership = _membership()
        if membership is None:
            ranks = num_ranks or 2
            _tune(measure_here(ranks, extent), output, num_measurements(ranks, extent))
            return
        if num_ranks is not None:
            raise click.UsageError(
                f"A launcher has started {membership.size} workers, and the command measures "
                "between these: leave out -n."
            )
        _tune_cluster(membership, extent, output)
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error


def measure_here(num_ranks: int, extent: Extent) -> Iterator[Measured]:
    """Measures this host, with this number of processes."""
    if num_ranks > 1:
        yield from local_rank_sweeps(num_ranks, *extent)
    yield from local_sweep(*extent)


def num_measurements(num_ranks: int, extent: Extent) -> int:
    """Returns how many measurements `measure_here` makes."""
    num_links = 2 if native_core().kernel is not None else 1
    num_groups = min(num_ranks, 3) - 1
    return (2 + num_links * num_groups) * len(extent.sizes)


def with_progress(measured: Iterable[Measured], count: int | None) -> list[Measured]:
    """Collects measurements, and shows their progress on the terminal."""
    with click.progressbar(
        measured,
        length=count,
        label="Measuring",
        item_show_func=_in_words,
        # Starting the processes takes longest, which would spoil the estimate of the bar.
        show_eta=False,
        file=sys.stderr,
    ) as found:
        return list(found)


def _membership() -> Membership | None:
    """Returns the membership of this process in a launched job, or None if it is alone."""
    resolver = detect()
    membership = None if resolver is None else Membership.of(resolver)
    return membership if membership is not None and membership.size > 1 else None


def _tune_cluster(membership: Membership, extent: Extent, output: Path | None) -> None:
    """Measures the links of a cluster, and then all-reduces that run by these measurements."""
    store = open_store(membership, _TIMEOUT_SECONDS)
    place = store, membership.rank, membership.size, *extent

    def whole(tuning: Tuning) -> list[Measured]:
        rows = list(cluster_sweep(*place, tuning))
        leave(store, membership.rank, membership.size)
        return rows

    def whole_for_all(tuning: Tuning) -> list[Measured]:
        store.set("tuning", tuning.to_text())
        return whole(tuning)

    links = rank_sweeps(*place)
    if membership.rank == 0:
        _tune(itertools.chain(links, local_sweep(*extent)), output, whole=whole_for_all)
    else:
        list(links)
        whole(Tuning.from_text(store.get("tuning").decode()))


def _tune(
    measured: Iterable[Measured],
    output: Path | None,
    count: int | None = None,
    whole: Callable[[Tuning], Iterable[Measured]] = lambda tuning: (),
) -> None:
    path = output or tuning_path()
    # Now, because failing after the measurements would be too late.
    path.parent.mkdir(parents=True, exist_ok=True)
    before = _former(path)
    rows = with_progress(measured, count)
    found, sum_rate = fitted(rows)
    kept = {} if before is None else {name: getattr(before, name) for name in LINKS}
    links: dict[str, Link | None] = {name: found.get(name, kept.get(name)) for name in LINKS}
    tuning = Tuning(
        **links,  # type: ignore[arg-type]
        sum_rate=sum_rate,
        machine=this_machine_in_words(),
        date=datetime.date.today().isoformat(),
        version=_version(),
    )
    runs = {} if before is None else {run[:2]: run for run in before.runs}
    runs |= {run[:2]: run for run in runs_of([*rows, *whole(tuning)])}
    tuning = replace(tuning, runs=tuple(runs.values()))
    _write(path, tuning)
    _report(before, tuning, errors_between(rows))
    click.echo(f"Written to {path}.")
    if os.environ.get(TUNING) == "off":
        click.echo(f"{TUNING}=off is set: no run reads it.")
    elif path != tuning_path():
        click.echo(f"Runs read it with {TUNING}={path}.")


def _former(path: Path) -> Tuning | None:
    """Returns the earlier tuning of this machine."""
    try:
        tuning = read_tuning(path)
    except TuningError:
        return None
    return tuning if tuning.machine == this_machine_in_words() else None


def _write(path: Path, tuning: Tuning) -> None:
    # A run that starts now reads the old file or the new one, never half a file.
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(tuning.to_text())
    fresh.replace(path)


def _report(before: Tuning | None, tuning: Tuning, errors: dict[str, float]) -> None:
    spellings: dict[str, Callable[[float], str]] = {
        "latency": spell_seconds,
        "bandwidth": spell_rate,
    }
    rows = []
    for name in LINKS:
        link: Link | None = getattr(tuning, name)
        if link is None:
            continue
        old: Link | None = None if before is None else getattr(before, name)
        row = [LINK_NAMES[name]]
        for constant, spell in spellings.items():
            now = getattr(link, constant)
            then = None if old is None else getattr(old, constant)
            row += [spell(now), change_in_words(then, now) if name in errors else "kept"]
        rows.append([*row, f"{errors[name]:.0%}".replace("%", " %") if name in errors else ""])
    show_table(["link", "latency", "change", "bandwidth", "change", "missed by"], rows)


def _in_words(one: Measured | None) -> str:
    return "" if one is None else f"{LINK_NAMES[one.link]}, {spell_bytes(one.num_bytes)}"


def _version() -> str:
    try:
        return version("unisono")
    except PackageNotFoundError:
        return "not installed"
