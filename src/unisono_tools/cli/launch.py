"""`unisono launch`: runs a script in several workers, under torch's elastic agent."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from unisono_tools.cli.extras import quiet_torch


def read_range(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, int]:
    """Reads a number, or two with a colon between them."""
    first, _, last = text.partition(":")
    try:
        least, most = int(first), int(last or first)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise click.BadParameter(
            f"{text!r} is neither a number of hosts nor MIN:MAX. Write 4 or 1:4."
        )
    return least, most


def read_pairs(context: click.Context, parameter: click.Parameter, text: str) -> dict[str, str]:
    """Reads pairs of a name and a value."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if wrong := [name for name, _, value in pairs if not value]:
        raise click.BadParameter(f"{wrong[0]!r} has no value. Write it as {wrong[0]}=VALUE.")
    return {name.strip(): value.strip() for name, _, value in pairs}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--nproc-per-node",
    "num_workers",
    metavar="N",
    type=click.IntRange(min=1),
    help="Workers per host. Default: one per GPU.",
)
@click.option(
    "--nnodes",
    "num_hosts",
    metavar="N|MIN:MAX",
    default="1",
    show_default=True,
    callback=read_range,
    help="Number of hosts in the job. With MIN:MAX, it starts with at least MIN, and starts all "
    "workers again when hosts come or go; with --elastic, hosts join and leave while it runs.",
)
@click.option(
    "--node-rank",
    "host_rank",
    metavar="N",
    type=click.IntRange(min=0),
    help="Number of this host, from 0. Default: hosts get numbers in the order they connect.",
)
@click.option(
    "--rdzv-endpoint",
    "endpoint",
    metavar="HOST:PORT",
    help="Address and port of the first host, the same on all hosts. With --elastic, also those of "
    "other hosts, with commas between them.",
)
@click.option(
    "--rdzv-conf",
    "rendezvous",
    metavar="KEY=VALUE,...",
    default="",
    callback=read_pairs,
    help="How hosts find each other, as for torchrun, for example last_call_timeout=10.",
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to restart all workers after one has failed; with --elastic, that one alone.",
)
@click.option(
    "--elastic",
    "is_elastic",
    is_flag=True,
    help="For scripts with elastic=True: if a worker fails, the others go on.",
)
@click.option(
    "--grace-period",
    "grace_seconds",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    help="How long workers may take to leave when they are told to end, before they are killed.",
)
@click.option(
    "--tf-config-cluster",
    "cluster_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read TF_CONFIG from this file instead of the environment.",
)
@click.option(
    "--all-local", is_flag=True, help="Start the tasks of all hosts in TF_CONFIG on this host."
)
@click.option(
    "-m",
    "--module",
    "is_module",
    is_flag=True,
    help="SCRIPT is a module, such as package.train, as for `python -m`.",
)
@click.argument("script", type=click.Path(dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    num_workers: int | None,
    num_hosts: tuple[int, int],
    host_rank: int | None,
    endpoint: str | None,
    rendezvous: dict[str, str],
    max_restarts: int,
    is_elastic: bool,  # noqa: FBT001 (click gives all options by name)
    grace_seconds: float,
    cluster_file: Path | None,
    all_local: bool,  # noqa: FBT001
    is_module: bool,  # noqa: FBT001
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Runs SCRIPT with its ARGUMENTS in several workers.

    With -n, it starts that many workers on each host. With a cluster in TF_CONFIG, it starts one
    worker for each task on this host. Otherwise it starts one worker per GPU of this host.

    Each line of output begins with the name of its worker. If a worker fails, all others end, and
    the exit status is that of the worker. With --elastic, the others go on, and the exit status is
    0 if one of them finishes. All workers also end at Ctrl-C, and when the launcher is killed. The
    launcher passes SIGTERM on to its workers, and ends with their exit status if all of them leave
    with the same one.
    """
    if not is_module and not Path(script).exists():
        raise click.BadParameter(
            f"File {script!r} does not exist. Check the path, or write `-m` for a module.",
            param_hint="'SCRIPT'",
        )
    with quiet_torch():
        from unisono_tools.launching.workers import Job, run_workers

    job = Job(
        num_workers,
        num_hosts,
        host_rank,
        endpoint,
        rendezvous,
        max_restarts,
        is_elastic,
        grace_seconds,
        cluster_file,
        all_local,
    )
    sys.exit(
        run_workers(job, [sys.executable, "-u", *(["-m"] if is_module else []), script, *arguments])
    )
