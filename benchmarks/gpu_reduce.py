"""Reductions of R replicas on one GPU, against a copy of the device and against torch.

    python benchmarks/gpu_reduce.py

Large values: useful traffic (R inputs read, one result written) as a part of what a copy of the
device reaches in the same turns. Batches: many gradients in one call, in place, against
`torch._foreach_add_`, once as called (the host reads every tensor) and once as the GPU runs it
(captured and replayed). Competitors are taken in turn and timed with device events over calls back
to back; numbers are medians. Every result is first compared with a sum in float64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Work, interleaved
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from unisono.kernels import reduce_into
from unisono.kernels.gpu import launch, read_tables, triton_status
from unisono.options import ReduceOp
from unisono_tools.benchmarks.peers.shapes import RESNET50
from unisono_tools.benchmarks.rows import machine, spell_bytes

SIZES = [2**26, 2**27, 2**28]
REPLICAS = [2, 4, 8]
BATCHES = {"300 x 4 KB": [1024] * 300, "ResNet-50": RESNET50}

Item = Sequence[Tensor]


def microseconds(works: dict[str, Work]) -> dict[str, float]:
    times = interleaved(works, rounds=9, calls=20)
    return {name: 1e3 * milliseconds for name, milliseconds in times.items()}


def check(batch: Sequence[Item], outputs: Sequence[Item], expected: Sequence[Tensor]) -> None:
    """Reduces once, and compares with sums in float64."""
    assert reduce_into(ReduceOp.SUM, batch, outputs)
    for item, output, total in zip(batch, outputs, expected, strict=True):
        limit = 1e-6 * len(item)
        torch.testing.assert_close(output[0].double(), total, rtol=limit, atol=10 * limit)


def exact_sum(item: Item) -> Tensor:
    total = item[0].double()
    for one in item[1:]:
        total += one.double()
    return total


def large(num_bytes: int, num_replicas: int) -> dict[str, Any]:
    length = num_bytes // 4
    item = [torch.randn(length, device="cuda") for _ in range(num_replicas)]
    output = torch.empty(length, device="cuda")
    check([item], [[output]], [exact_sum(item)])

    def add_chain() -> None:
        torch.add(item[0], item[1], out=output)
        for one in item[2:]:
            output.add_(one)

    times = microseconds(
        {
            "copy": lambda: output.copy_(item[0]),
            "unisono": lambda: reduce_into(ReduceOp.SUM, [item], [[output]]),
            "add chain": add_chain,
            "stack.sum": lambda: torch.sum(torch.stack(item), 0, out=output),
        }
    )
    traffic = {name: (num_replicas + 1) * num_bytes / us / 1e6 for name, us in times.items()}
    traffic["copy"] = 2 * num_bytes / times["copy"] / 1e6
    return {"bytes": num_bytes, "replicas": num_replicas, "us": times, "TB/s": traffic}


def batch(name: str, num_replicas: int) -> dict[str, Any]:
    lengths = BATCHES[name]
    items = [[torch.randn(n, device="cuda") for _ in range(num_replicas)] for n in lengths]
    check(items, [[torch.empty_like(item[0])] for item in items], list(map(exact_sum, items)))
    by_replica = list(zip(*items, strict=True))

    def foreach() -> None:
        for tensors in by_replica[1:]:
            torch._foreach_add_(by_replica[0], tensors)

    # Into the tensors of the first replica, as `_foreach_add_` does.
    firsts = [[item[0]] for item in items]
    tables = read_tables(ReduceOp.SUM, items, firsts, triton_status().sums.BLOCK)  # type: ignore[union-attr]
    assert tables is not None
    (table,) = tables
    rows = torch.frombuffer(bytearray(table.rows), dtype=torch.int64).cuda()
    works: dict[str, Work] = {
        "unisono": lambda: reduce_into(ReduceOp.SUM, items, firsts),
        "foreach": foreach,
        "unisono on the GPU": replayed(
            lambda: launch(triton_status().sums, ReduceOp.SUM, table, rows)
        ),
        "foreach on the GPU": replayed(foreach),
    }
    return {"batch": name, "replicas": num_replicas, "us": microseconds(works)}


def replayed(work: Work) -> Work:
    """Returns what runs the same kernels without the host's part."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    console = Console(width=100)
    todo = [(size, replicas) for size in SIZES for replicas in REPLICAS]
    with Progress(transient=True) as progress:
        rows = [large(*one) for one in progress.track(todo)]
        batches = [batch(name, 4) for name in progress.track(list(BATCHES))]
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    table = Table("size", "R", "copy TB/s", "unisono TB/s", "of the copy", "add chain", "stack.sum")
    for row in rows:
        rate = row["TB/s"]
        copy, ours = rate["copy"], rate["unisono"]
        peers = [f"{rate[name]:.2f}" for name in ("add chain", "stack.sum")]
        shown = f"{copy:.2f}", f"{ours:.2f}", f"{ours / copy:.2f}", *peers
        table.add_row(spell_bytes(row["bytes"]), str(row["replicas"]), *shown)
    console.print(table)
    table = Table(
        "batch, R = 4", "unisono us", "foreach us", "ratio", "GPU alone", "GPU alone", "ratio"
    )
    for row in batches:
        us = row["us"]
        called = us["unisono"], us["foreach"], us["foreach"] / us["unisono"]
        alone = us["unisono on the GPU"], us["foreach on the GPU"]
        numbers = *called, *alone, alone[1] / alone[0]
        table.add_row(row["batch"], *(f"{number:.1f}" for number in numbers))
    console.print(table)
    if options.json:
        content = {
            "command": "python benchmarks/gpu_reduce.py",
            "machine": machine(),
            "rows": [*rows, *batches],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
