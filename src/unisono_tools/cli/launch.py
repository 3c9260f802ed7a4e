"""`unisono launch`: runs a script in several workers, under torch's elastic agent."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from unisono_tools.cli.extras import quiet_torch


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
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of hosts in the job.",
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
    help="Address and port of the first host, the same on all hosts.",
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to restart all workers after one has failed.",
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
    num_hosts: int,
    host_rank: int | None,
    endpoint: str | None,
    max_restarts: int,
    cluster_file: Path | None,
    all_local: bool,  # noqa: FBT001 (click gives all options by name)
    is_module: bool,  # noqa: FBT001
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Runs SCRIPT with its ARGUMENTS in several workers.

    With -n, it starts that many workers on each host. With a cluster in TF_CONFIG, it starts one
    worker for each task on this host. Otherwise it starts one worker per GPU of this host.

    Each line of output begins with the name of its worker. If a worker fails, all others end, and
    the exit status is that of the worker. All workers also end at Ctrl-C, and when the launcher is
    killed.
    """
    if not is_module and not Path(script).exists():
        raise click.BadParameter(
            f"File {script!r} does not exist. Check the path, or write `-m` for a module.",
            param_hint="'SCRIPT'",
        )
    with quiet_torch():
        from unisono_tools.launching.workers import Job, run_workers

    job = Job(num_workers, num_hosts, host_rank, endpoint, max_restarts, cluster_file, all_local)
    sys.exit(
        run_workers(job, [sys.executable, "-u", *(["-m"] if is_module else []), script, *arguments])
    )
