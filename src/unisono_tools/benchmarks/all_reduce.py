"""All-reduce between processes, against Gloo, DDP's buckets, MPI and the memory.

Float32 sums, in place. All competitors take turns within one run, so that a busy machine disturbs
them alike; every turn has fresh numbers, and every result is checked. The time of a turn is from
the first rank that begins to the last that ends, after a meeting of all, divided by the number of
calls. GB/s is the bytes of one rank by the time, bus GB/s 2 (R - 1) / R of it. Ratios are those of
medians: how many times our time the others need.

plain       our communicator on tensors from anywhere
in place    the same on tensors of `communicator.allocate`, where a strategy keeps its gradients
TCP         between hosts, the same with the implementation `TCP`
MPI         between hosts, the same in processes that mpirun has started; flat MPI as below
Gloo        torch.distributed.all_reduce; through loopback, or between hosts
DDP bucket  the way of gradients through DDP's reducer, over Gloo: divided into buckets of 25 MB,
            all reduced at the same time, copied back
flat MPI    mpi4py's Allreduce with MPI.IN_PLACE
floor       all ranks at the same time read and write their own bytes once and wait for nobody.
            All-reduce must do as much: 1.0 means that nothing is left to win
"""

from __future__ import annotations

import itertools
import math
import shlex
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore

from unisono_tools.benchmarks.peers.crew import DEADLINE_S, Crew
from unisono_tools.benchmarks.peers.mpi import Mpi
from unisono_tools.benchmarks.peers.torch_ranks import work
from unisono_tools.benchmarks.rows import Row, mark_sizes, spell_bytes
from unisono_tools.benchmarks.timing import MIN_TURNS, REST_S, Series
from unisono_tools.namespaces import Hosts, enter, make_hosts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = tuple(2**power for power in range(6, 29, 2))
QUICK_SIZES = (2**6, 2**12, 2**16, 2**20, 2**24)
SIZES_BETWEEN_HOSTS = (2**6, 2**12, 2**16, 2**20, 2**22, 2**24, 2**26)
RANKS = (2, 4, 8)
OURS = {
    "plain": "unisono",
    "in place": "unisono in place",
    "plain, TCP": "unisono TCP",
    "in place, TCP": "unisono TCP in place",
    "plain, MPI": "unisono MPI",
    "in place, MPI": "unisono MPI in place",
}
# The columns of the table between hosts, and the rows whose numbers they have.
_ENGINES = {
    f"{engine}, {where}": f"{where}{'' if engine == 'Gloo' else f', {engine}'}"
    for engine in ("Gloo", "TCP", "MPI")
    for where in ("plain", "in place")
}
# Blue for Unisono, orange for Gloo, with and without DDP's buckets.
_STYLES = {
    "unisono, plain": {"color": "#5c6bc0"},
    "unisono, in place": {"color": "#1a237e"},
    "Gloo": {"color": "#ef6c00"},
    "DDP bucket": {"color": "#ffb74d"},
    "MPI": {"color": "#6d4c41"},
    "Open MPI": {"color": "#6d4c41"},
    "floor": {"color": "#90a4ae", "linestyle": "--"},
}
# A turn reduces this many bytes again and again, so that the time to begin it does not count.
BYTES_PER_TURN = 16 * 2**20
# Sums of sums grow by the number of ranks with every call, and must stay within float32.
MAX_DOUBLINGS = 100


@dataclass(frozen=True)
class AllReduceSweep:
    """All-reduce of float32 between the processes of this host, or of network namespaces.

    Attributes:
        sizes: The bytes of one rank; all up to 256 MB if not given, fewer between hosts.
        ranks: The numbers of processes; by default 2, 4 and 8, or two on each of several hosts.
        seconds: The time of one measurement.
        bind: Whether each of our ranks keeps to one core in its turns.
        mpi: An interpreter that has mpi4py.
        mpirun: The command that starts MPI processes, up to `-n`; by default the one beside `mpi`.
        hosts: How many network namespaces share the ranks; 1 is this host as it is.
        rate: What a namespace may send, such as 1gbit.
    """

    sizes: Sequence[int] = ()
    ranks: Sequence[int] = ()
    seconds: float = 4.0
    bind: bool = False
    mpi: str | None = None
    mpirun: str | None = None
    hosts: int = 1
    rate: str | None = None
    name: str = "all-reduce"

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", (2 * self.hosts,) if self.hosts > 1 else RANKS)
        if not self.sizes:
            sizes = SIZES_BETWEEN_HOSTS if self.hosts > 1 else SIZES
            object.__setattr__(self, "sizes", sizes)
        if bad := [size for size in self.sizes if size < 4 or size % 4]:
            raise ValueError(f"Sizes must be multiples of 4 bytes, got {bad}.")
        if min(self.ranks) < 2 or any(size % self.hosts for size in self.ranks):
            raise ValueError(
                f"Ranks must be 2 or more, and the same number on each of {self.hosts} hosts, got "
                f"{list(self.ranks)}."
            )
        if self.hosts == 1 and self.rate:
            raise ValueError("--rate limits the link between hosts: give --hosts 2 as well.")

    @property
    def num_measurements(self) -> int:
        """See `Sweep`."""
        return len(self.ranks) * len(self.sizes)

    @property
    def left_out(self) -> Sequence[str]:
        """See `Sweep`."""
        return [] if self.mpi else ["MPI (give --mpi PYTHON)"]

    def summary(self, rows: Sequence[Row]) -> str:
        """See `Sweep`. Between hosts, a table of the engines, as Markdown."""
        if self.hosts == 1:
            return ""
        ratios = {(row.num_bytes, row.case["memory"]): row.ratios for row in rows}
        engines = [name for name, memory in _ENGINES.items() if (self.sizes[0], memory) in ratios]
        lines = [["size", *engines, *(["flat MPI"] if self.mpi else [])]]
        lines.append(["---"] * len(lines[0]))
        for num_bytes in self.sizes:
            found = [ratios[num_bytes, _ENGINES[name]]["Gloo"] for name in engines]
            if self.mpi:
                own = ratios[num_bytes, "plain"]
                found.append(own["Gloo"] / own["flat MPI"])
            lines.append([spell_bytes(num_bytes), *(f"{one:.3g}" for one in found)])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"How many times as long torch's Gloo between all ranks takes:\n\n{table}"

    def measurements(self) -> Generator[Sequence[Row], None, None]:
        """See `Sweep`."""
        with ExitStack() as stack:
            hosts = None
            if self.hosts > 1:
                hosts = stack.enter_context(make_hosts(self.hosts))
                if self.rate:
                    hosts.slow_down(self.rate)
            for size in self.ranks:
                with self._contest(size, hosts) as contest:
                    for num_bytes in self.sizes:
                        yield _rows(num_bytes, size, contest.measure(num_bytes, self.seconds))

    @contextmanager
    def _contest(self, size: int, hosts: Hosts | None) -> Iterator[Contest]:
        """Starts the ranks, and ends them."""
        with ExitStack() as stack:
            crews: list[Crew | Mpi] = []
            store = _meeting_point(hosts)
            if self.mpi:
                beside = Path(self.mpi).with_name("mpirun")
                mpirun = self.mpirun or str(beside if beside.exists() else "mpirun")
                arguments = (store.host, store.port, max(self.sizes)) if hosts else ()
                mpi = Mpi(size, shlex.split(mpirun), self.mpi, hosts, arguments)
                crews.append(stack.enter_context(closing(mpi)))
            names = hosts.names if hosts else []
            settings = ((store.host, store.port), max(self.sizes), names)
            ours = Crew("torch", size, partial(work, bind=self.bind), *settings)
            crews.insert(0, stack.enter_context(closing(ours)))
            yield Contest(size, crews)

    def draw(self, figure: Figure, rows: Sequence[Row]) -> None:
        """Draws latency over size, with a panel for each number of ranks."""
        figure.set_size_inches(1 + 3.4 * len(self.ranks), 4.6)
        axes = figure.subplots(1, len(self.ranks), squeeze=False, sharey=True)[0]
        for axis, count in zip(axes, self.ranks, strict=True):
            for name, points in _lines([row for row in rows if row.case["ranks"] == count]).items():
                style = _STYLES.get(name, {})
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **style)
            axis.set(title=f"{count} ranks", xscale="log", yscale="log")
            axis.set_xlabel("size of one rank's tensor")
            axis.grid(visible=True, which="major", alpha=0.3)
            mark_sizes(axis, most=5)
        axes[0].set_ylabel("latency")
        marks = {1: "1 us", 1e2: "100 us", 1e4: "10 ms", 1e6: "1 s"}
        axes[0].set_yticks(list(marks), list(marks.values()))
        axes[0].set_yticks([], minor=True)
        lines, names = axes[0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)


class Contest:
    """Ranks of all competitors, who take turns."""

    def __init__(self, size: int, crews: list[Crew | Mpi]) -> None:
        self._size = size
        self._crews = crews
        self._seeds = itertools.count()

    def measure(self, num_bytes: int, budget_s: float) -> dict[str, Series]:
        """Returns the seconds of each competitor, a number a turn."""
        crews = {name: crew for crew in self._crews for name in crew.ask("prepare", num_bytes)[0]}
        most = int(MAX_DOUBLINGS / math.log2(self._size))
        calls = max(1, min(most, BYTES_PER_TURN // num_bytes))
        times: dict[str, Series] = {name: [] for name in crews}
        end = time.perf_counter() + budget_s
        while time.perf_counter() < end or len(next(iter(times.values()))) < MIN_TURNS:
            for name, crew in crews.items():
                time.sleep(REST_S)
                times[name].append(self._turn(crew, name, calls))
        return times

    def _turn(self, crew: Crew | Mpi, name: str, calls: int) -> float:
        # One clock for all processes of the system.
        spans = crew.ask("turn", name, next(self._seeds), calls)
        starts, ends = zip(*spans, strict=True)
        return float(max(ends) - min(starts)) / calls


def _meeting_point(hosts: Hosts | None) -> TCPStore:
    """A store that all ranks reach, on the first host if there are several."""
    if hosts is None:
        return _store("127.0.0.1")
    # A thread that ends: this one must stay where it is.
    with ThreadPoolExecutor(1, initializer=enter, initargs=(hosts.names[0],)) as thread:
        return thread.submit(_store, hosts.address(0)).result()


def _store(address: str) -> TCPStore:
    limit = timedelta(seconds=DEADLINE_S)
    return TCPStore(address, 0, is_master=True, timeout=limit, wait_for_workers=False)


def _rows(num_bytes: int, size: int, series: dict[str, Series]) -> list[Row]:
    """The rows of one size: for plain tensors and those in shared memory, by engine."""
    others = {name: times for name, times in series.items() if name not in OURS.values()}

    def rates(seconds: float) -> dict[str, float]:
        bandwidth = num_bytes / seconds / 1e9
        return {"GB/s": bandwidth, "bus GB/s": bandwidth * 2 * (size - 1) / size}

    return [
        Row.compare(
            {"size": spell_bytes(num_bytes), "ranks": size, "memory": memory},
            num_bytes,
            series[name],
            others,
            rates,
        )
        for memory, name in OURS.items()
        if name in series
    ]


def _lines(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Bytes and microseconds of all competitors, ours by their memory."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        micros = row.seconds["p50"] * 1e6
        ours = lines.setdefault(f"unisono, {row.case['memory']}", [])
        ours.append((row.num_bytes, micros))
        if row.case["memory"] == "plain":
            for name, ratio in row.ratios.items():
                lines.setdefault(name, []).append((row.num_bytes, ratio * micros))
    return lines
