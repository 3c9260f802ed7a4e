"""`unisono plan`: predicts the communication time of a step on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from unisono_tools.cli.extras import quiet_torch, require
from unisono_tools.cli.parameters import F, parse_bytes, plot_option


def _latency_option(name: str, where: str) -> Callable[[F], F]:
    seconds, text = click.FloatRange(min=0), f"Latency {where}, in seconds."
    return click.option(name, metavar="S", type=seconds, help=text)


def _bandwidth_option(name: str, text: str) -> Callable[[F], F]:
    return click.option(name, metavar="B/S", type=click.FloatRange(min=1), help=text)


@click.command(short_help="Predicts how long a step's communication takes.")
@click.option(
    "--hosts",
    "num_hosts",
    metavar="N",
    type=click.IntRange(min=1),
    required=True,
    help="Number of hosts.",
)
@click.option(
    "--gpus", metavar="N", type=click.IntRange(min=1), required=True, help="GPUs per host."
)
@click.option(
    "--model-bytes",
    metavar="BYTES",
    type=parse_bytes,
    required=True,
    help="Size of all gradients, such as 28e9 (7 billion float32 parameters), 28G or 500M.",
)
@click.option(
    "--tuning",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of `unisono tune`. Default: the one of this machine, if it was tuned.",
)
@_latency_option("--latency", "between hosts")
@_bandwidth_option("--bandwidth", "Bandwidth of a host, in bytes/s.")
@_latency_option("--inside-latency", "inside a host")
@_bandwidth_option("--inside-bandwidth", "Bandwidth of a GPU inside its host, in bytes/s.")
@_bandwidth_option("--memory-rate", "Speed of a sum on a GPU, in bytes/s read and written.")
@plot_option("picture", help="Draw time over size into FILE, such as out.png.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Compare the predictions with times measured on this machine. Default: if it was tuned.",
)
def plan(
    num_hosts: int,
    gpus: int,
    model_bytes: int,
    file: Path | None,
    picture: Path | None,
    as_json: bool,  # noqa: FBT001 (click gives all options by name)
    measure: bool | None,  # noqa: FBT001
    **given: float | None,
) -> None:
    """Predicts how long the all-reduce of all gradients takes on a cluster, for each algorithm.

    Latencies and bandwidths come from the options, then from the tuning file, then from the
    defaults for a modern cluster. The output shows each value and where it comes from. The
    predicted time assumes no overlap with the backward pass.
    """
    if picture is not None:
        require("bench", "matplotlib")
    if num_hosts * gpus == 1:
        raise click.UsageError("One GPU does not communicate: give more --gpus or --hosts.")
    with quiet_torch():
        from unisono_tools.planning.command import show_plan

        show_plan(
            num_hosts, gpus, model_bytes, file, picture, given, as_json=as_json, measure=measure
        )
