"""`unisono plan`: what the communication of a step takes on a cluster that one may not have."""

from __future__ import annotations

from pathlib import Path

import click

from unisono_tools.cli.extras import require
from unisono_tools.cli.parameters import OutputPath


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
    if num_hosts * gpus == 1:
        raise click.UsageError("One GPU has nobody to talk to: give more --gpus or --hosts.")
    from unisono_tools.planning.command import show_plan

    show_plan(num_hosts, gpus, model_bytes, file, picture, given, as_json=as_json, measure=measure)
