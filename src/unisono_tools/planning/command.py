"""What `unisono plan` does: it predicts, compares with measured times, and prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from unisono.costs import (
    BYTES_PER_PACK,
    Cluster,
    Link,
    Tuning,
    best_bytes_per_pack,
    current_tuning,
    read_tuning,
)
from unisono.errors import UnisonoError
from unisono_tools.planning.constants import Constants, constants_of
from unisono_tools.planning.model import Model
from unisono_tools.planning.predictions import crossovers, curves, predictions, sizes_up_to
from unisono_tools.pricing import line_of, running
from unisono_tools.tables import LINK_NAMES, show_table, spell_bytes, spell_rate, spell_seconds
from unisono_tools.tuning.command import Extent, measure_here, num_measurements, with_progress
from unisono_tools.tuning.measured import Measured, predicted_seconds

# Between the sizes that `unisono tune` fits.
_CHECKED = Extent([3 * 4**power for power in range(4, 12)], 0.1)


def show_plan(
    num_hosts: int,
    gpus: int,
    model_bytes: float,
    file: Path | None,
    picture: Path | None,
    given: dict[str, float | None],
    *,
    as_json: bool,
    measure: bool | None,
) -> None:
    """Prints the plan, and draws it if asked to.

    Args:
        num_hosts: How many hosts there are.
        gpus: How many GPUs each has.
        model_bytes: Bytes of the gradients of a step.
        file: The tuning to read, if not that of this machine.
        picture: Where to draw time by size.
        given: The constants that the command line gives, by the names of its options.
        as_json: Whether to print JSON.
        measure: Whether to compare with times measured here. None: if this machine was tuned.
    """
    try:
        here = current_tuning()
        tuning = here if file is None else read_tuning(file)
        constants = constants_of(given, tuning)
        model = Model(Cluster(num_hosts, gpus, *constants[:3]), constants.runs)
        result = _result(model, constants, model_bytes)
        if measure and here is None:
            raise click.UsageError("This machine was not tuned yet: run `unisono tune` first.")
        if here is not None and measure is not False:
            result["measured"] = _compared(here)
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error
    if picture is not None:
        from unisono_tools.planning.picture import draw

        draw(model, model_bytes, picture)
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        _show(model, constants, result)


def _result(model: Model, constants: Constants, model_bytes: float) -> dict[str, Any]:
    sizes = sizes_up_to(model_bytes)
    cluster, run = model.cluster, model.run
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
        "corrected_by": None if run is None else {"hosts": run[0], "gpus": run[1]},
        "algorithms": [row._asdict() for row in predictions(model, model_bytes)],
        "crossovers": [row._asdict() for row in crossovers(curves(model, sizes), sizes)],
        "unisono": _own(model, model_bytes),
    }


def _own(model: Model, model_bytes: float) -> dict[str, Any]:
    """Returns what Unisono runs there, the size of its packs, and the time of one pack."""
    _, phases = running(model.cluster, BYTES_PER_PACK)
    packs = best_bytes_per_pack(line_of(phases, model.cluster), int(model_bytes))
    name, phases = running(model.cluster, packs)
    seconds = model.seconds(phases, packs)
    return {"algorithm": name, "bytes_per_pack": packs, "seconds_per_pack": seconds}


def _compared(tuning: Tuning) -> list[dict[str, Any]]:
    """Measures sizes that were not fitted, on the fitted links."""
    measured = with_progress(measure_here(2, _CHECKED), num_measurements(2, _CHECKED))
    rows = []
    for one in measured:
        link: Link | None = getattr(tuning, one.link)
        if link is not None:
            rows.append(_comparison(one, _predicted(one, link, tuning)))
    return sorted(rows, key=lambda row: list(LINK_NAMES).index(row["link"]))


def _predicted(one: Measured, link: Link, tuning: Tuning) -> float:
    if one.link != "inside":
        return predicted_seconds(one, link, tuning.sum_rate)
    # That is all that Unisono runs on one host.
    model = Model(Cluster(1, one.num_ranks, link, link, tuning.sum_rate), tuning.runs)
    return model.seconds(running(model.cluster, one.num_bytes)[1], one.num_bytes)


def _comparison(one: Measured, predicted: float) -> dict[str, Any]:
    error = predicted / one.seconds - 1
    return {**one._asdict(), "predicted_seconds": predicted, "error_percent": 100 * error}


def _show(model: Model, constants: Constants, result: dict[str, Any]) -> None:
    said, cluster = constants.sources, model.cluster
    for what, link, prefix in (
        ("inside a host", cluster.inside, "inside_"),
        ("between hosts", cluster.between, ""),
    ):
        click.echo(
            f"{what}: {spell_seconds(link.latency)} ({said[prefix + 'latency']}), "
            f"{spell_rate(link.bandwidth)} ({said[prefix + 'bandwidth']})"
        )
    click.echo(f"sums: {spell_rate(cluster.memory_rate)} ({said['memory_rate']})")
    if model.run is not None:
        shape = f"{model.run.num_hosts} x {model.run.ranks_per_host}"
        click.echo(f"corrected by all-reduces that were measured on {shape} ranks")
    click.echo()
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
    click.echo("The fastest algorithm is predicted to be")
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
