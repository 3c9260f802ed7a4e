"""`unisono tune`: measures the links of this host or cluster, and saves their constants."""

from __future__ import annotations

from pathlib import Path

import click

from unisono_tools.cli.extras import quiet_torch
from unisono_tools.cli.parameters import quick_option


@click.command(short_help="Measures the links of this host or cluster.")
@click.option(
    "-n",
    "num_ranks",
    metavar="N",
    type=click.IntRange(min=1),
    help="Processes on this host to measure between. Default: 2.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write. Default: a file in the user's cache, which later runs read.",
)
@quick_option
def tune(
    num_ranks: int | None,
    output: Path | None,
    quick: bool,  # noqa: FBT001 (click gives all options by name)
) -> None:
    """Measures latency and bandwidth, and saves them for later runs.

    Started alone, it measures this host. Started on every worker by a launcher (`srun unisono
    tune`, `torchrun --no-python ... unisono tune`), it also measures the links between hosts, and
    rank 0 writes the file. Takes about half a minute, or a few seconds with --quick.
    """
    with quiet_torch():
        from unisono_tools.tuning.command import tune_here_or_cluster

        tune_here_or_cluster(num_ranks, output, quick=quick)
