"""`unisono bench`: sweeps against other libraries, with a bar, a table, a picture and JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.extras import Unavailable, require
from unisono.cli.parameters import ListCommand, OutputPath, parse_bytes
from unisono.errors import UnsupportedError

if TYPE_CHECKING:
    from unisono.benchmarks import Sweep


@click.group()
def bench() -> None:
    """Measures Unisono against what else is installed.

    Competitors take turns within one run, so that a busy machine disturbs all alike. The table has
    the times of Unisono (min, p50, p99 and max over turns), what it does in a second, and for each
    competitor the ratio of medians: above 1 Unisono is faster.

    \b
    Exit status:
      0    all results were right
      1    a result was wrong, or a competitor failed
      2    the command line was wrong
      3    a package or a permission is missing
      130  Ctrl-C
    """


def _reports(make_sweep: Callable[..., Sweep]) -> Callable[..., None]:
    """Makes a function that makes a sweep one that runs it, with the options of all sweeps."""

    @click.option("--quick", is_flag=True, help="Less of everything, for a look.")
    @click.option(
        "--json",
        "json_file",
        metavar="FILE",
        type=OutputPath(allow_dash=True),
        help="Write the numbers to FILE; - is the standard output.",
    )
    @click.option(
        "--plot",
        metavar="FILE",
        type=OutputPath(".png", ".svg", ".pdf"),
        help="Draw a picture into FILE, such as out.png.",
    )
    @wraps(make_sweep)
    def command(*, json_file: Path | None, plot: Path | None, **options: Any) -> None:
        require("bench", "rich", *(["matplotlib"] if plot else []))
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
        help=f"Seconds a {unit}.",
    )


_sizes_option = click.option(
    "--sizes",
    metavar="BYTES...",
    type=parse_bytes,
    multiple=True,
    help="These alone: 64 16K 4M, or 64,16KB,4MiB.",
)
_tensorflow_option = click.option(
    "--tensorflow",
    metavar="PYTHON",
    default=lambda: sys.executable if find_spec("tensorflow") else None,
    help="An interpreter that has TensorFlow. Without it: this one, if it has.",
)


@bench.command(cls=ListCommand)
@_reports
@_seconds_option(0.6, "measurement")
@_sizes_option
@click.option(
    "--replicas", metavar="R...", type=int, multiple=True, help="How many. Without it: 2 4 8."
)
@click.option("--batches", is_flag=True, help="The batches alone, or besides --sizes.")
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
    """Sums over the replicas of one process.

    Into one output and into all replicas, for sizes of 1 KB to 256 MB, 300 tensors of 4 KB and the
    gradients of ResNet-50; against torch, TensorFlow and the speed of the memory. About seven
    minutes, two with --quick.
    """
    from unisono.benchmarks.reduce import BATCHES, QUICK_SIZES, REPLICAS, SIZES, ReduceSweep

    names = tuple(BATCHES) if batches or not sizes else ()
    if not (sizes or batches):
        sizes = QUICK_SIZES if quick else SIZES
    return ReduceSweep(sizes, replicas or REPLICAS, names, seconds, tensorflow)


@bench.command("all-reduce", cls=ListCommand)
@_reports
@_seconds_option(4.0, "measurement")
@_sizes_option
@click.option(
    "--ranks", metavar="R...", type=int, multiple=True, help="Processes. Without it: 2 4 8."
)
@click.option("--bind", is_flag=True, help="Keep each of our ranks on one core in its turns.")
@click.option(
    "--mpi",
    metavar="PYTHON",
    default=lambda: sys.executable if find_spec("mpi4py") else None,
    help="An interpreter that has mpi4py. Without it: this one, if it has.",
)
@click.option(
    "--mpirun",
    metavar="COMMAND",
    help='What starts MPI processes; "mpirun --oversubscribe" for more than cores. Without it: the '
    "one beside the interpreter.",
)
@click.option(
    "--hosts",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Network namespaces to share the ranks among; as root.",
)
@click.option("--rate", metavar="RATE", help="What each of several hosts may send, such as 1gbit.")
def all_reduce(*, quick: bool, sizes: tuple[int, ...], **options: Any) -> Sweep:
    """All-reduce between processes.

    Through shared memory and, with --hosts, between network namespaces; against Gloo, the buckets
    of DDP, MPI and the speed of the memory. Every result is checked. About ten minutes, two
    with --quick. Between hosts a table has the engines Gloo, TCP and MPI, and takes about five
    minutes.

    MPI's launcher binds processes to cores where there are enough; --bind does so to ours. Gloo,
    whose second thread would suffer, always has all cores.
    """
    from unisono.benchmarks.all_reduce import QUICK_SIZES, AllReduceSweep

    return AllReduceSweep(sizes or (QUICK_SIZES if quick else ()), **options)


@bench.command(cls=ListCommand)
@_reports
@_seconds_option(15.0, "model")
@_tensorflow_option
@click.option(
    "--replicas", metavar="R...", type=int, multiple=True, help="How many. Without it: 2."
)
def step(
    *, quick: bool, seconds: float, tensorflow: str | None, replicas: tuple[int, ...]
) -> Sweep:
    """Whole training steps on CPU replicas.

    Six small models in one process, in one process per replica under MultiWorkerMirroredStrategy
    and under DDP over Gloo and over Unisono, in TensorFlow, and in threads that never meet. The
    losses must agree before anything is timed. About two minutes for each number of replicas; two
    models alone with --quick.
    """
    from unisono.benchmarks.training_step import MODELS, QUICK_MODELS, REPLICAS, StepSweep

    models = QUICK_MODELS if quick else MODELS
    return StepSweep(models, seconds, tensorflow, replicas or REPLICAS)


def _run(sweep: Sweep, json_file: Path | None, plot: Path | None) -> None:
    """Measures, and reports in all ways that were asked for."""
    from rich.console import Console

    from unisono.benchmarks import BenchmarkError, report

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
