"""Processes with limits: what they cannot have is replaced, or all ranks are told."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import Store

from processes.harness import run_ranks
from unisono.communicators import connect
from unisono.kernels import native_core
from unisono.options import ReduceOp

pytestmark = pytest.mark.skipif(
    native_core().kernel is None, reason=f"needs the native core: {native_core().status}"
)
MEBIBYTE = 1 << 20
LIMITS = {"AS": resource.RLIMIT_AS, "FSIZE": resource.RLIMIT_FSIZE}


def limit(what: str, num_bytes: int) -> None:
    """Allows this process so much more than it has."""
    if what == "AS":
        num_bytes += int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(LIMITS[what], (num_bytes, resource.getrlimit(LIMITS[what])[1]))


def reduce(store: Store, rank: int, size: int, what: str, num_bytes: int) -> tuple[str, int]:
    if rank == 1:
        limit(what, num_bytes)
    with connect(store, rank, size, timeout_seconds=30) as communicator:
        memory = [communicator.allocate(n * MEBIBYTE) for n in (1, 128, 2)]
        for one in memory[::2]:
            total = one.view(torch.float32)
            total.fill_(rank + 1)
            communicator.all_reduce(ReduceOp.SUM, [total])
            assert bool((total == 3).all())
        resident = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        return communicator.name, resident


@pytest.mark.parametrize(
    ("what", "num_bytes", "name"),
    [
        # Enough for what ranks begin with, but not for what they ask for then.
        ("AS", 220 * MEBIBYTE, "shared memory"),
        ("FSIZE", 64 * MEBIBYTE, "shared memory"),
        # Not even for that: another engine connects them.
        ("FSIZE", MEBIBYTE, "Gloo"),
    ],
)
def test_a_limited_rank_and_its_peers_use_what_they_can(
    what: str, num_bytes: int, name: str
) -> None:
    for found, _ in run_ranks(2, reduce, what, num_bytes):
        assert name in found


def measure(store: Store, rank: int, size: int) -> int:
    before = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    with connect(store, rank, size, timeout_seconds=30) as communicator:
        assert communicator.name == "shared memory"
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096 - before


def test_shared_memory_is_as_large_as_needed() -> None:
    for num_bytes in run_ranks(2, measure):
        assert num_bytes < 256 * MEBIBYTE
