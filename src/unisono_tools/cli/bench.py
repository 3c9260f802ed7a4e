"""`unisono bench`: compares Unisono with other libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono_tools.cli.extras import Unavailable, quiet_torch, require
from unisono_tools.cli.parameters import (
    ListCommand,
    OutputPath,
    parse_bytes,
    plot_option,
    quick_option,
)

if TYPE_CHECKING:
    from unisono_tools.benchmarks import Sweep


@click.group()
def bench() -> None:
    """Compares Unisono with the libraries that are installed.

    All competitors take turns in one run, so a busy machine slows all of them down. The tables show
    the times of Unisono (min, p50, p99 and max), its throughput, and for each competitor its median
    time divided by Unisono's: above 1, Unisono is faster.

    \b
    Exit status:
      0    all results were correct
      1    a result was wrong, or a competitor failed
      2    the command line is wrong
      3    a package or a permission is missing
      130  Ctrl-C
    """


def _reports(make_sweep: Callable[..., Sweep]) -> Callable[..., None]:
    """Turns a function that makes a sweep into a command, with the options of all sweeps."""

    @quick_option
    @click.option(
        "--json",
        "json_file",
        metavar="FILE",
        type=OutputPath(allow_dash=True),
        help="Write the numbers to FILE, or to the standard output for -.",
    )
    @plot_option()
    @wraps(make_sweep)
    def command(*, json_file: Path | None, plot: Path | None, **options: Any) -> None:
        require("bench", "rich", *(["matplotlib"] if plot else []))
        with quiet_torch():
            try:
                sweep = make_sweep(**options)
            except ValueError as error:
                raise click.UsageError(str(error)) from None
            _run(sweep, json_file, plot)

    return command


def _seconds_option(default: float, unit: str) -> Callable[[Any], Any]:
    return click.option(
        "--seconds",
        metavar="S",
        type=click.FloatRange(min=0),
        default=default,
        show_default=True,
        help=f"Seconds per {unit}.",
    )


_sizes_option = click.option(
    "--sizes",
    metavar="BYTES...",
    type=parse_bytes,
    multiple=True,
    help="Sizes to measure, such as 64 16K 4M.",
)
_tensorflow_option = click.option(
    "--tensorflow",
    metavar="PYTHON",
    default=lambda: sys.executable if find_spec("tensorflow") else None,
    help="A Python that has TensorFlow. Default: this one, if TensorFlow is installed.",
)


@bench.command(cls=ListCommand)
@_reports
@_seconds_option(0.6, "measurement")
@_sizes_option
@click.option(
    "--replicas", metavar="R...", type=int, multiple=True, help="Replicas. Default: 2 4 8."
)
@click.option(
    "--batches",
    is_flag=True,
    help="Measure the two batches of tensors: alone, or in addition to --sizes.",
)
@_tensorflow_option
def reduce(
    *,
    quick: bool,
    sizes: tuple[int, ...],
    batches: bool,
    replicas: tuple[int, ...],
    seconds: float,
    tensorflow: str | None,
) -> Sweep:
    """Measures sums over the replicas of one process.

    Sums tensors of 1 KB to 256 MB, a batch of 300 tensors of 4 KB and the gradients of ResNet-50,
    into one output and into all replicas. Compares with torch, TensorFlow and the memory bandwidth.
    Takes about seven minutes, or two with --quick.
    """
    from unisono_tools.benchmarks.reduce import BATCHES, QUICK_SIZES, REPLICAS, SIZES, ReduceSweep

    names = tuple(BATCHES) if batches or not sizes else ()
    if not (sizes or batches):
        sizes = QUICK_SIZES if quick else SIZES
    return ReduceSweep(sizes, replicas or REPLICAS, names, seconds, tensorflow)


@bench.command("all-reduce", cls=ListCommand)
@_reports
@_seconds_option(4.0, "measurement")
@_sizes_option
@click.option("--ranks", metavar="R...", type=int, multiple=True, help="Processes. Default: 2 4 8.")
@click.option("--bind", is_flag=True, help="Bind each rank of Unisono to one core.")
@click.option(
    "--mpi",
    metavar="PYTHON",
    default=lambda: sys.executable if find_spec("mpi4py") else None,
    help="A Python that has mpi4py; '' leaves MPI out. Default: this one, if it has.",
)
@click.option(
    "--mpirun",
    metavar="COMMAND",
    help='MPI launcher; use "mpirun --oversubscribe" for more ranks than cores. Default: the one '
    "beside the interpreter.",
)
@click.option(
    "--hosts",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Simulated hosts (network namespaces); needs root.",
)
@click.option("--rate", metavar="RATE", help="Network speed of each simulated host, such as 1gbit.")
def all_reduce(*, quick: bool, sizes: tuple[int, ...], **options: Any) -> Sweep:
    """Measures all-reduce between processes.

    Uses shared memory and, with --hosts, the network between simulated hosts. Compares with Gloo,
    DDP buckets, MPI and the memory bandwidth, and checks every result. Takes about ten minutes, or
    two with --quick. With --hosts, the table compares Gloo, TCP and MPI between hosts.

    MPI's launcher binds its processes to cores if there are enough; --bind does the same for
    Unisono. Gloo always uses all cores, because it needs a second thread.
    """
    from unisono_tools.benchmarks.all_reduce import QUICK_SIZES, AllReduceSweep

    return AllReduceSweep(sizes or (QUICK_SIZES if quick else ()), **options)


@bench.command(cls=ListCommand)
@_reports
@_seconds_option(15.0, "model")
@_tensorflow_option
@click.option("--replicas", metavar="R...", type=int, multiple=True, help="Replicas. Default: 2.")
def step(
    *, quick: bool, seconds: float, tensorflow: str | None, replicas: tuple[int, ...]
) -> Sweep:
    """Measures whole training steps on CPU replicas.

    Trains six small models in one process, and compares with one process per replica under
    MultiWorkerMirroredStrategy, with DDP over Gloo and over Unisono, with TensorFlow, and with
    threads that do not communicate. Checks that all losses agree first. Takes about two minutes per
    number of replicas; --quick trains only two models.
    """
    from unisono_tools.benchmarks.training_step import MODELS, QUICK_MODELS, REPLICAS, StepSweep

    models = QUICK_MODELS if quick else MODELS
    return StepSweep(models, seconds, tensorflow, replicas or REPLICAS)


def _run(sweep: Sweep, json_file: Path | None, plot: Path | None) -> None:
    """Measures, and writes the table, the JSON file and the picture."""
    from rich.console import Console

    from unisono.errors import UnsupportedError
    from unisono_tools.benchmarks import BenchmarkError, report

    asides = Console(stderr=True)
    try:
        rows = report.run(sweep, asides)
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from None
    except UnsupportedError as error:
        raise Unavailable(str(error)) from None
    takes_output = json_file == Path("-")
    report.print_table(sweep, rows, asides if takes_output else Console())
    if json_file is not None:
        text = report.as_json(sweep, rows)
        click.echo(text) if takes_output else json_file.write_text(text + "\n")
    if plot is not None:
        report.save_picture(sweep, rows, plot)
