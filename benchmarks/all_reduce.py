"""All-reduce between processes, against Gloo, DDP's buckets, MPI and the memory.

    python benchmarks/all_reduce.py                  # 2, 4 and 8 ranks, about ten minutes
    python benchmarks/all_reduce.py --quick          # fewer sizes, for a look
    python benchmarks/all_reduce.py --mpi PYTHON     # an interpreter with mpi4py
    python benchmarks/all_reduce.py --hosts 2 --rate 1gbit    # as root: network namespaces

For more MPI processes than cores, `--mpirun "mpirun --oversubscribe"`. The launcher binds processes
to cores where there are enough. `--bind` does so to our ranks in our turns and to the floor: on a
busy machine the scheduler often wakes two of them on one core. Gloo, whose second thread would
suffer, always has all cores.

Float32 sums, in place. All competitors take turns within one run, so that a busy machine disturbs
them alike; every turn has fresh numbers, and every result is checked. The time of a turn is from
the first rank that begins to the last that ends, after a meeting of all, divided by the number of
calls; numbers are medians. Algorithm bandwidth is the bytes of one rank by the time, bus bandwidth
2 (R - 1) / R of it. The columns of others are ratios: how many times our time they need.

plain       our communicator on tensors from anywhere
in place    the same on tensors of `communicator.allocate`, where a strategy keeps its gradients
Gloo        torch.distributed.all_reduce; through loopback, or between hosts
DDP bucket  the way of gradients through DDP's reducer, over Gloo: divided into buckets of 25 MB,
            all reduced at the same time, copied back
MPI         mpi4py's Allreduce with MPI.IN_PLACE
floor       all ranks at the same time read and write their own bytes once and wait for nobody.
            All-reduce must do as much: 1.0 means that nothing is left to win

With `--hosts`, the ranks are shared out among network namespaces with a link each; there is neither
MPI nor a floor then.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from harness import REST_S, machine, parse_bytes, spell_bytes, write_json
from peers.crew import DEADLINE_S, Crew
from peers.mpi import Mpi
from peers.torch_ranks import work
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

from unisono.errors import UnsupportedError
from unisono.kernels import native_core
from unisono.testing.namespaces import Hosts, enter, make_hosts

SIZES = [2**power for power in range(6, 29, 2)]
QUICK_SIZES = [2**6, 2**12, 2**16, 2**20, 2**24]
RANKS = [2, 4, 8]
OURS = {"plain": "unisono", "in place": "unisono in place"}
MIN_TURNS = 5
# A turn reduces this many bytes again and again, so that the time to begin it does not count.
BYTES_PER_TURN = 16 * 2**20
# Sums of sums grow by the number of ranks with every call, and must stay within float32.
MAX_DOUBLINGS = 100


class Contest:
    """Ranks of all competitors, who take turns."""

    def __init__(self, size: int, crews: list[Crew | Mpi]) -> None:
        self._size = size
        self._crews = crews
        self._seeds = itertools.count()

    def medians(self, num_bytes: int, budget_s: float) -> dict[str, float]:
        """Returns the median seconds of each competitor."""
        crews = {name: crew for crew in self._crews for name in crew.ask("prepare", num_bytes)[0]}
        most = int(MAX_DOUBLINGS / math.log2(self._size))
        calls = max(1, min(most, BYTES_PER_TURN // num_bytes))
        times: dict[str, list[float]] = {name: [] for name in crews}
        end = time.perf_counter() + budget_s
        while time.perf_counter() < end or len(next(iter(times.values()))) < MIN_TURNS:
            for name, crew in crews.items():
                time.sleep(REST_S)
                times[name].append(self._turn(crew, name, calls))
        return {name: statistics.median(series) for name, series in times.items()}

    def _turn(self, crew: Crew | Mpi, name: str, calls: int) -> float:
        # One clock for all processes of the system.
        spans = crew.ask("turn", name, next(self._seeds), calls)
        starts, ends = zip(*spans, strict=True)
        return float(max(ends) - min(starts)) / calls


@contextmanager
def contest(size: int, arguments: argparse.Namespace, hosts: Hosts | None) -> Iterator[Contest]:
    """Starts the ranks, and ends them."""
    with ExitStack() as stack:
        store = meeting_point(hosts)
        names = hosts.names if hosts else []
        settings = ((store.host, store.port), max(arguments.sizes), names)
        ranks = partial(work, bind=arguments.bind)
        crews: list[Crew | Mpi] = [Crew("torch", size, ranks, *settings)]
        stack.enter_context(closing(crews[0]))
        if arguments.mpi:
            mpi = Mpi(size, shlex.split(arguments.mpirun), arguments.mpi)
            crews.append(stack.enter_context(closing(mpi)))
        yield Contest(size, crews)


def meeting_point(hosts: Hosts | None) -> TCPStore:
    """A store that all ranks reach, on the first host if there are several."""
    if hosts is None:
        return _store("127.0.0.1")
    # A thread that ends: this one must stay where it is.
    with ThreadPoolExecutor(1, initializer=enter, initargs=(hosts.names[0],)) as thread:
        return thread.submit(_store, hosts.address(0)).result()


def _store(address: str) -> TCPStore:
    limit = timedelta(seconds=DEADLINE_S)
    return TCPStore(address, 0, is_master=True, timeout=limit, wait_for_workers=False)


def rows_of(num_bytes: int, size: int, medians: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of one size: one for plain tensors, one for those in shared memory."""
    return [
        {
            "bytes": num_bytes,
            "ranks": size,
            "memory": memory,
            "latency_us": medians[name] * 1e6,
            "algorithm_gb_s": num_bytes / medians[name] / 1e9,
            "bus_gb_s": num_bytes / medians[name] / 1e9 * 2 * (size - 1) / size,
            "ratios": {
                other: seconds / medians[name]
                for other, seconds in medians.items()
                if other not in OURS.values()
            },
        }
        for memory, name in OURS.items()
    ]


def measure(arguments: argparse.Namespace, hosts: Hosts | None) -> list[dict[str, Any]]:
    """All rows of the table."""
    rows = []
    with Progress() as progress:
        total = len(arguments.ranks) * len(arguments.sizes)
        task = progress.add_task("all-reduce", total=total)
        for size in arguments.ranks:
            with contest(size, arguments, hosts) as entrants:
                for num_bytes in arguments.sizes:
                    medians = entrants.medians(num_bytes, arguments.seconds)
                    rows += rows_of(num_bytes, size, medians)
                    progress.advance(task)
    return rows


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    option = parser.add_argument
    option("--ranks", type=int, nargs="+", help="numbers of processes (default: 2 4 8)")
    option("--sizes", type=parse_bytes, nargs="+", help="bytes of a rank, such as 64 16K 4M")
    option("--seconds", type=float, default=4.0, help="time a size (default: 4)")
    option("--quick", action="store_true", help="fewer sizes")
    option("--bind", action="store_true", help="keep each of our ranks on one core")
    option("--mpi", metavar="PYTHON", help="an interpreter with mpi4py")
    option("--mpirun", default="mpirun", help="what starts MPI processes (default: mpirun)")
    option("--hosts", type=int, default=1, help="network namespaces to share ranks among")
    option("--rate", help="what a host may send, such as 1gbit (with --hosts)")
    option("--json", type=Path, help="write the rows to this file")
    option("--plot", type=Path, help="draw latency and bus bandwidth into this file")
    arguments = parser.parse_args(words)
    arguments.sizes = arguments.sizes or (QUICK_SIZES if arguments.quick else SIZES)
    arguments.ranks = arguments.ranks or ([2 * arguments.hosts] if arguments.hosts > 1 else RANKS)
    if bad := [size for size in arguments.sizes if size < 4 or size % 4]:
        parser.error(f"sizes must be multiples of 4 bytes, got {bad}")
    if min(arguments.ranks) < 2 or any(size % arguments.hosts for size in arguments.ranks):
        parser.error(
            f"ranks must be 2 or more, as many on each of {arguments.hosts} hosts, got "
            f"{arguments.ranks}"
        )
    if arguments.hosts > 1 and arguments.mpi:
        parser.error("MPI does not take part between hosts: leave out --mpi or --hosts")
    if arguments.hosts == 1 and arguments.rate:
        parser.error("--rate is that of the link between hosts: give --hosts 2")
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    with ExitStack() as stack:
        hosts = None
        if arguments.hosts > 1:
            try:
                hosts = stack.enter_context(make_hosts(arguments.hosts))
            except UnsupportedError as error:
                print(f"Skipped: {error}")
                return
            if arguments.rate:
                hosts.slow_down(arguments.rate)
        rows = measure(arguments, hosts)
    show(rows, arguments)
    if arguments.json:
        write_json(arguments.json, shlex.join(["python", *sys.argv]), rows)
    if arguments.plot:
        plot(rows, arguments.plot)


def show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints the table."""
    names = list(rows[0]["ratios"])
    where = (
        f"{arguments.hosts} hosts, {arguments.rate or 'fast'} link, " if arguments.hosts > 1 else ""
    )
    title = f"{where}{machine()['cpu']}, {machine()['cores']} cores, {native_core().status}"
    head = ["size", "R", "memory", "latency", "alg GB/s", "bus GB/s"]
    table = Table(*head, *names, title=title)
    for row in rows:
        table.add_row(
            spell_bytes(row["bytes"]),
            str(row["ranks"]),
            row["memory"],
            f"{row['latency_us']:.1f} us",
            f"{row['algorithm_gb_s']:.3g}",
            f"{row['bus_gb_s']:.3g}",
            *(f"{row['ratios'][name]:.2f}" for name in names),
        )
    Console().print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws latency above and bus bandwidth below, a column for each number of ranks."""
    from matplotlib.figure import Figure

    counts = sorted({row["ranks"] for row in rows})
    figure = Figure(figsize=(1 + 4 * len(counts), 7), layout="constrained")
    axes = figure.subplots(2, len(counts), squeeze=False, sharex=True, sharey="row")
    for column, count in enumerate(counts):
        for name, points in _lines([row for row in rows if row["ranks"] == count]).items():
            sizes, micros = zip(*points, strict=True)
            factor = 2 * (count - 1) / count / 1e3
            buses = [size / micro * factor for size, micro in points]
            axes[0][column].plot(sizes, micros, marker="o", markersize=3, label=name)
            axes[1][column].plot(sizes, buses, marker="o", markersize=3, label=name)
        axes[0][column].set(title=f"{count} ranks", xscale="log", yscale="log")
        axes[1][column].set(xlabel="bytes of one rank", yscale="log")
    axes[0][0].set_ylabel("latency, us")
    axes[1][0].set_ylabel("bus bandwidth, GB/s")
    for axis in axes.flat:
        axis.grid(visible=True, which="major", alpha=0.3)
    axes[1][-1].legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _lines(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Bytes and microseconds of all competitors, ours by their memory."""
    lines: dict[str, list[tuple[int, float]]] = {f"unisono, {memory}": [] for memory in OURS}
    for row in rows:
        lines[f"unisono, {row['memory']}"].append((row["bytes"], row["latency_us"]))
        if row["memory"] == "plain":
            for name, ratio in row["ratios"].items():
                micros = ratio * row["latency_us"]
                lines.setdefault(name, []).append((row["bytes"], micros))
    return lines


if __name__ == "__main__":
    main()
