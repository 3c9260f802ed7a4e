"""`unisono plan`: what the communication of a step takes on a cluster that one may not have."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from unisono.cli.extras import require
from unisono.cli.parameters import OutputPath
from unisono.cli.plan_constants import Constants, constants_of
from unisono.cli.predictions import crossovers, curves, predictions, sizes_up_to
from unisono.cli.tables import LINK_NAMES, show_table, spell_bytes, spell_rate, spell_seconds
from unisono.cli.tune import Extent, measure_here, num_measurements, with_progress
from unisono.costs import (
    BYTES_PER_PACK,
    Cluster,
    Link,
    Measured,
    Tuning,
    best_bytes_per_pack,
    current_tuning,
    line_of,
    predicted_seconds,
    read_tuning,
    running,
    seconds_of,
)
from unisono.errors import UnisonoError

# Between the sizes that `unisono tune` fits.
_CHECKED = Extent([3 * 4**power for power in range(4, 12)], 0.1)


@click.command(short_help="Predicts how long a step's communication takes.")
@click.option(
    "--hosts", "num_hosts", metavar="N", type=click.IntRange(min=1), required=True, help="Hosts."
)
@click.option(
    "--gpus", metavar="N", type=click.IntRange(min=1), required=True, help="GPUs of each host."
)
@click.option(
    "--model-bytes",
    metavar="BYTES",
    type=click.FloatRange(min=1),
    required=True,
    help="Bytes of the gradients of a step: 28e9 for 7 billion parameters in float32.",
)
@click.option(
    "--tuning",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Constants that `unisono tune` has written, there or elsewhere.",
)
@click.option(
    "--latency", metavar="S", type=click.FloatRange(min=0), help="Between hosts, in seconds."
)
@click.option(
    "--bandwidth", metavar="B/S", type=click.FloatRange(min=1), help="Of a host, in bytes a second."
)
@click.option(
    "--inside-latency", metavar="S", type=click.FloatRange(min=0), help="Inside a host, in seconds."
)
@click.option(
    "--inside-bandwidth",
    metavar="B/S",
    type=click.FloatRange(min=1),
    help="Of a GPU, in bytes a second.",
)
@click.option(
    "--memory-rate",
    metavar="B/S",
    type=click.FloatRange(min=1),
    help="Of a sum, in bytes read and written.",
)
@click.option(
    "--plot",
    "picture",
    metavar="FILE",
    type=OutputPath(".png", ".svg", ".pdf"),
    help="Draw time by size into FILE, such as out.png.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Compare predicted with measured times on this machine; by default if it was tuned.",
)
def plan(
    num_hosts: int,
    gpus: int,
    model_bytes: float,
    file: Path | None,
    picture: Path | None,
    as_json: bool,  # noqa: FBT001 (click gives all options by name)
    measure: bool | None,  # noqa: FBT001
    **given: float | None,
) -> None:
    """Predicts the communication of a training step on a cluster, for each algorithm.

    Constants are those given, else those of the tuning, else those of a cluster of today; what was
    used is shown. The time is that of one all-reduce of all gradients, with nothing hidden behind
    the backward pass.
    """
    if picture is not None:
        require("bench", "matplotlib")
    try:
        if num_hosts * gpus == 1:
            raise click.UsageError("One GPU has nobody to talk to: give more --gpus or --hosts.")
        here = current_tuning()
        tuning = here if file is None else read_tuning(file)
        constants = constants_of(given, tuning)
        cluster = Cluster(num_hosts, gpus, *constants[:3])
        result = _result(cluster, constants, model_bytes)
        if measure and here is None:
            raise click.UsageError("This machine was not tuned yet: run `unisono tune` first.")
        if here is not None and measure is not False:
            result["measured"] = _compared(here)
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error
    if picture is not None:
        from unisono.cli.plan_picture import draw

        draw(cluster, model_bytes, picture)
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        _show(cluster, constants, result)


def _result(cluster: Cluster, constants: Constants, model_bytes: float) -> dict[str, Any]:
    sizes = sizes_up_to(model_bytes)
    return {
        "hosts": cluster.num_hosts,
        "gpus": cluster.ranks_per_host,
        "model_bytes": model_bytes,
        "constants": {
            "inside": asdict(cluster.inside),
            "between": asdict(cluster.between),
            "memory_rate": cluster.memory_rate,
            "sources": constants.sources,
        },
        "algorithms": [row._asdict() for row in predictions(cluster, model_bytes)],
        "crossovers": [row._asdict() for row in crossovers(curves(cluster, sizes), sizes)],
        "unisono": _own(cluster, model_bytes),
    }


def _own(cluster: Cluster, model_bytes: float) -> dict[str, Any]:
    """What Unisono itself runs there, in packs of which size, and how long one pack takes."""
    _, phases = running(cluster, BYTES_PER_PACK)
    packs = best_bytes_per_pack(line_of(phases, cluster), int(model_bytes))
    name, phases = running(cluster, packs)
    seconds = seconds_of(phases, cluster, packs)
    return {"algorithm": name, "bytes_per_pack": packs, "seconds_per_pack": seconds}


def _compared(tuning: Tuning) -> list[dict[str, Any]]:
    """Measures sizes that were not fitted, on the links that were."""
    measured = with_progress(measure_here(2, _CHECKED), num_measurements(2, _CHECKED))
    rows = []
    for one in measured:
        link: Link | None = getattr(tuning, one.link)
        if link is not None:
            predicted = predicted_seconds(one, link, tuning.sum_rate)
            rows.append(_comparison(one, predicted))
    return sorted(rows, key=lambda row: list(LINK_NAMES).index(row["link"]))


def _comparison(one: Measured, predicted: float) -> dict[str, Any]:
    error = predicted / one.seconds - 1
    return {**one._asdict(), "predicted_seconds": predicted, "error_percent": 100 * error}


def _show(cluster: Cluster, constants: Constants, result: dict[str, Any]) -> None:
    said = constants.sources
    for what, link, prefix in (
        ("inside a host", cluster.inside, "inside_"),
        ("between hosts", cluster.between, ""),
    ):
        click.echo(
            f"{what}: {spell_seconds(link.latency)} ({said[prefix + 'latency']}), "
            f"{spell_rate(link.bandwidth)} ({said[prefix + 'bandwidth']})"
        )
    click.echo(f"sums: {spell_rate(cluster.memory_rate)} ({said['memory_rate']})\n")
    size = spell_bytes(result["model_bytes"])
    click.echo(f"All-reduce of {size} on {cluster.num_hosts} x {cluster.ranks_per_host} ranks:")
    show_table(
        ["algorithm", "steps", "bytes inside", "bytes between", "time"],
        [
            [
                row["algorithm"],
                str(row["steps"]),
                spell_bytes(row["inside_bytes"]),
                spell_bytes(row["between_bytes"]),
                spell_seconds(row["seconds"]),
            ]
            for row in result["algorithms"]
        ],
    )
    own = result["unisono"]
    packs = spell_bytes(own["bytes_per_pack"])
    seconds = spell_seconds(own["seconds_per_pack"])
    click.echo(f"\nUnisono runs {own['algorithm']} there, in packs of {packs}, {seconds} each.")
    click.echo("The fastest is predicted to be")
    for row in result["crossovers"]:
        before, after = row["fastest_before"], row["to"]
        click.echo(f"  {before} below {spell_bytes(row['num_bytes'])}, then {after}")
    if not result["crossovers"]:
        click.echo(f"  {result['algorithms'][0]['algorithm']} for every size")
    if "measured" in result:
        _show_compared(result["measured"])


def _show_compared(rows: list[dict[str, Any]]) -> None:
    click.echo("\nPredicted and measured on this machine, at sizes that were not fitted:")
    show_table(
        ["link", "ranks", "size", "predicted", "measured", "error"],
        [
            [
                LINK_NAMES[row["link"]],
                str(row["num_ranks"]),
                spell_bytes(row["num_bytes"]),
                spell_seconds(row["predicted_seconds"]),
                spell_seconds(row["seconds"]),
                f"{row['error_percent']:+.0f} %",
            ]
            for row in rows
        ],
    )
