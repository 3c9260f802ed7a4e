"""Reductions of R replicas on one host, against torch, TensorFlow and the memory limit.

    python benchmarks/reduce.py                      # everything, about seven minutes
    python benchmarks/reduce.py --quick              # fewer sizes, for a look
    python benchmarks/reduce.py --tensorflow /path/to/python-with-tensorflow

Every competitor is run in turn within one process run; numbers are medians, and columns other than
`unisono` are ratios: how many times the time of `unisono` the competitor needs. `limit` is the time
in which torch reads all inputs and fills all outputs, measured in the same turns, so 1.0 means
that nothing is left to win and less than 1.0 that the reduction is slower than the memory.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Work, interleaved_medians, machine, spell_bytes, write_json
from peers.shapes import RESNET50
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import unisono as uo
from unisono.kernels import native_core

SIZES = [2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28]
QUICK_SIZES = [2**12, 2**18, 2**22, 2**26]
REPLICAS = [2, 4, 8]
BATCHES = {"300 x 4 KB": [1024] * 300, "ResNet-50": RESNET50}

Item = list[Tensor]


def competitors(items: list[Item], into: str) -> dict[str, Work]:
    """Returns everything that reduces `items`, one list of tensors a value, into one or all."""
    num_replicas = len(items[0])
    copies = num_replicas if into == "all" else 1
    values = [uo.PerReplica(item) for item in items]
    pairs = [(value, value if into == "all" else "cpu:0") for value in values]
    ops = uo.ReductionToOneDevice()
    outputs = [[torch.empty_like(item[0]) for _ in range(copies)] for item in items]
    works: dict[str, Work] = {"unisono": lambda: ops.batch_reduce(uo.ReduceOp.SUM, pairs)}
    if len(items) == 1:
        works["unisono"] = lambda: ops.reduce(uo.ReduceOp.SUM, *pairs[0])
        works["stack.sum"] = lambda: _copied([torch.stack(items[0]).sum(0)], copies)
    works["add chain"] = lambda: [_copied([_add_chain(item)], copies) for item in items]
    works["foreach"] = lambda: _foreach(items, copies)
    works["limit"] = lambda: _read_and_fill(items, outputs)
    return works


def _add_chain(item: Item) -> Tensor:
    total = item[0] + item[1]
    for tensor in item[2:]:
        total += tensor
    return total


def _copied(totals: Sequence[Tensor], copies: int) -> list[Tensor]:
    return [total.clone() for total in totals for _ in range(copies - 1)]


def _foreach(items: list[Item], copies: int) -> list[Tensor]:
    by_replica = list(zip(*items, strict=True))
    totals = torch._foreach_add(by_replica[0], by_replica[1])
    for tensors in by_replica[2:]:
        torch._foreach_add_(totals, tensors)
    return _copied(totals, copies)


def _read_and_fill(items: list[Item], outputs: list[Item]) -> None:
    for item in items:
        for tensor in item:
            torch.sum(tensor)
    for output in outputs:
        torch._foreach_zero_(output)


class TensorFlow:
    """TensorFlow in an interpreter of its own, asked case by case."""

    def __init__(self, interpreter: str) -> None:
        script = Path(__file__).parent / "peers" / "tensorflow_reduce.py"
        self._process = subprocess.Popen(
            [interpreter, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, sizes: list[int], replicas: int, into: str, repeats: int) -> dict[str, float]:
        """Returns the seconds of `batch_reduce`, eager and in a graph."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        case = {"sizes": sizes, "replicas": replicas, "into": into, "repeats": repeats}
        print(json.dumps(case), file=stdin, flush=True)
        answer = json.loads(stdout.readline())
        return {"TF eager": answer["eager_s"], "TF graph": answer["graph_s"]}

    def close(self) -> None:
        """Ends the interpreter."""
        self._process.communicate(timeout=60)


def measure(
    case: str, sizes: list[int], replicas: int, into: str, budget_s: float, peer: TensorFlow | None
) -> dict[str, Any]:
    """Measures one row of the table, in three rounds in which everybody has its turn."""
    items = [[torch.randn(size) for _ in range(replicas)] for size in sizes]
    works = competitors(items, into)
    num_bytes = 4 * sum(sizes)
    rounds = []
    for _ in range(3):
        times = interleaved_medians(works, budget_s=budget_s / 3)
        if peer is not None and replicas * num_bytes <= 2**27:
            times |= peer.measure(sizes, replicas, into, repeats=5)
        rounds.append(times)
    medians = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    own = medians["unisono"]
    writes = replicas if into == "all" else 1
    return {
        "case": case,
        "bytes": num_bytes,
        "replicas": replicas,
        "into": into,
        "unisono_us": own * 1e6,
        "gb_s": num_bytes * (replicas + writes) / own / 1e9,
        "ratios": {name: time / own for name, time in medians.items() if name != "unisono"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter with TensorFlow")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file")
    arguments = parser.parse_args()
    cases = [(spell_bytes(b), [b // 4]) for b in (QUICK_SIZES if arguments.quick else SIZES)]
    cases += list(BATCHES.items())
    peer = TensorFlow(arguments.tensorflow) if arguments.tensorflow else None
    rows = []
    with Progress() as progress:
        task = progress.add_task("reduce", total=len(cases) * len(REPLICAS) * 2)
        for case, sizes in cases:
            for replicas in REPLICAS:
                for into in ("one", "all"):
                    rows.append(measure(case, sizes, replicas, into, 0.6, peer))
                    progress.advance(task)
    if peer is not None:
        peer.close()
    show(rows)
    if arguments.json:
        write_json(arguments.json, shlex.join(["python", *sys.argv]), rows)
    if arguments.plot:
        plot(rows, arguments.plot)


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    title = f"{machine()['cpu']}, {torch.get_num_threads()} threads, kernel: {native_core().status}"
    table = Table("case", "R", "into", "unisono", "GB/s", *names, title=title)
    for row in rows:
        ratios = [row["ratios"].get(name) for name in names]
        table.add_row(
            row["case"],
            str(row["replicas"]),
            row["into"],
            f"{row['unisono_us']:.0f} us",
            f"{row['gb_s']:.1f}",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    Console().print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws how many times faster than the add chain, and how near to the memory limit."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, into in zip(axes, ("one", "all"), strict=True):
        for replicas in REPLICAS:
            line = [
                row
                for row in rows
                if row["replicas"] == replicas
                and row["into"] == into
                and row["case"] not in BATCHES
            ]
            sizes = [row["bytes"] for row in line]
            axis.plot(
                sizes,
                [row["ratios"]["add chain"] for row in line],
                marker="o",
                label=f"R = {replicas}",
            )
        axis.axhline(1, color="grey", linewidth=1)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="bytes of one replica",
            title=f"into {into}" + (" replicas" if into == "all" else " output"),
        )
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_ylabel("times faster than the torch add chain")
    axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
