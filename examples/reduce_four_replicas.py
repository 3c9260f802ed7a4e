"""Reduces the gradients of four replicas with each algorithm, and shows how long each takes.

    python examples/reduce_four_replicas.py
    python examples/reduce_four_replicas.py --replicas 8

The results are compared with float64. All reductions give the same bits.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import unisono as uo
from unisono.kernels import native_core

# The tensors of a small ConvNet: many small ones, a few large ones.
SHAPES = [(32, 3, 3, 3), (32,), (64, 32, 3, 3), (64,), (4096, 256), (256,), (256, 10), (10,)] * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4, help="number of replicas (default: 4)")
    num_replicas = parser.parse_args().replicas
    console = Console()

    gradients = [[torch.randn(shape) for _ in range(num_replicas)] for shape in SHAPES]
    batch = [uo.PerReplica(one) for one in gradients]
    pairs = [(value, value) for value in batch]
    num_bytes = sum(one[0].nbytes for one in gradients)
    console.print(
        f"{len(batch)} gradients, {num_bytes / 2**20:.1f} MiB, on each of {num_replicas} replicas: "
        f"{', '.join(map(str, batch[0].devices))}. Kernel: {native_core().status}."
    )

    table = Table("reduced by", "ms", "speed", "largest error", title="All-reduce, mean")
    baseline = _seconds(lambda: _torch_loop(gradients))
    table.add_row("plain torch loop", f"{baseline * 1e3:.2f}", "1.0x", "")
    for ops in [uo.ReductionToOneDevice(), uo.HierarchicalCopyAllReduce(), uo.NcclAllReduce()]:
        results: list[Any] = ops.batch_reduce(uo.ReduceOp.MEAN, pairs)
        error = max(
            float((result.values[-1] - torch.stack(one).double().mean(0)).abs().max())
            for result, one in zip(results, gradients, strict=True)
        )
        seconds = _seconds(functools.partial(ops.batch_reduce, uo.ReduceOp.MEAN, pairs))
        table.add_row(
            type(ops).__name__,
            f"{seconds * 1e3:.2f}",
            f"{baseline / seconds:.1f}x",
            f"{error:.1e}",
        )
    console.print(table)


def _torch_loop(gradients: list[list[Tensor]]) -> list[list[Tensor]]:
    """A loop written by hand: add, divide, and copy for each replica."""
    results = []
    for tensors in gradients:
        total = tensors[0] + tensors[1] if len(tensors) > 1 else tensors[0].clone()
        for tensor in tensors[2:]:
            total += tensor
        total /= len(tensors)
        results.append([total] + [total.clone() for _ in tensors[1:]])
    return results


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
