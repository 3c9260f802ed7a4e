"""`unisono tune`: measures the links of this host or cluster, and writes down their constants."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Measures the links of this host or cluster.")
@click.option(
    "-n",
    "num_ranks",
    metavar="N",
    type=click.IntRange(min=1),
    help="Processes of this host to measure between. Without it: 2. With 1 none.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, instead of the one in the user's cache.",
)
@click.option("--quick", is_flag=True, help="Fewer sizes and repetitions, for a look.")
def tune(
    num_ranks: int | None,
    output: Path | None,
    quick: bool,  # noqa: FBT001 (click gives all options by name)
) -> None:
    """Measures latency and bandwidth, and writes the constants for later runs to choose by.

    Alone it measures this host. Started by a launcher on every worker (`srun unisono tune`,
    `torchrun --no-python ... unisono tune`) it measures the links between hosts as well, and rank 0
    writes the file. About half a minute, a few seconds with --quick.
    """
    from unisono_tools.tuning.command import tune_here_or_cluster

    tune_here_or_cluster(num_ranks, output, quick=quick)
