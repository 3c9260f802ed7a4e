"""`unisono launch`: a script in several workers, with torch's elastic agent to look after them."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--nproc-per-node",
    "num_workers",
    metavar="N",
    type=click.IntRange(min=1),
    help="Workers on this host. Without it: one per GPU.",
)
@click.option(
    "--nnodes",
    "num_hosts",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Hosts of the job.",
)
@click.option(
    "--node-rank",
    "host_rank",
    metavar="N",
    type=click.IntRange(min=0),
    help="Which host this is. Without it the hosts are numbered as they come.",
)
@click.option(
    "--rdzv-endpoint",
    "endpoint",
    metavar="HOST:PORT",
    help="Where the hosts meet: an address of the first one, the same on all.",
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to start all workers anew after one has failed.",
)
@click.option(
    "--tf-config-cluster",
    "cluster_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TF_CONFIG to use instead of that of the environment.",
)
@click.option("--all-local", is_flag=True, help="Start all tasks of TF_CONFIG on this host.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    num_workers: int | None,
    num_hosts: int,
    host_rank: int | None,
    endpoint: str | None,
    max_restarts: int,
    cluster_file: Path | None,
    all_local: bool,  # noqa: FBT001 (click gives all options by name)
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Runs SCRIPT with its ARGUMENTS in several workers.

    With -n, that many workers on each host. With a cluster in TF_CONFIG, one worker for each task
    of this host. Otherwise one worker for each GPU of this host. Every line that a worker prints is
    marked with its name. All workers end when one fails, at Ctrl-C, and when the launcher ends in
    any other way.
    """
    from unisono_tools.launching.workers import Job, run_workers

    job = Job(num_workers, num_hosts, host_rank, endpoint, max_restarts, cluster_file, all_local)
    sys.exit(run_workers(job, [sys.executable, "-u", script, *arguments]))
