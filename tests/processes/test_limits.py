"""Processes with limits: what they cannot have is replaced, or all ranks raise an error."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, Store

from processes.harness import run_ranks
from unisono.communicators import connect
from unisono.errors import CommunicationError
from unisono.kernels import native_core
from unisono.options import CommunicationImplementation, ReduceOp

pytestmark = pytest.mark.skipif(
    native_core().kernel is None, reason=f"needs the native core: {native_core().status}"
)
MEBIBYTE = 1 << 20
LIMITS = {
    "AS": resource.RLIMIT_AS,
    "FSIZE": resource.RLIMIT_FSIZE,
    "NOFILE": resource.RLIMIT_NOFILE,
}
RING = CommunicationImplementation.RING


def limit(what: str, amount: int) -> None:
    """Allows this process so much more than it has."""
    if what == "AS":
        amount += int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    elif what == "NOFILE":
        amount += max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(LIMITS[what], (amount, resource.getrlimit(LIMITS[what])[1]))


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


# Too little for any engine. With as few files, Gloo would end the process.
TOO_LITTLE = [("AS", 2 * MEBIBYTE), ("NOFILE", 0), ("NOFILE", 8)]


def connect_with_too_little(store: Store, rank: int, size: int) -> list[tuple[str, object]]:
    told: list[tuple[str, object]] = []
    for number, (what, amount) in enumerate(TOO_LITTLE):
        for limited in range(size):
            before = resource.getrlimit(LIMITS[what])
            prefixed = PrefixStore(f"{number}/{limited}", store)
            if rank == limited:
                limit(what, amount)
            # A rank that waits in vain for another one raises a `WorkerTimeoutError`.
            with pytest.raises(CommunicationError) as caught:
                connect(prefixed, rank, size, timeout_seconds=30, implementation=RING)
            resource.setrlimit(LIMITS[what], before)
            told.append((type(caught.value).__name__, caught.value.ranks))
    with connect(PrefixStore("at last", store), rank, size, timeout_seconds=60) as communicator:
        communicator.barrier()
    return told


def test_a_limit_that_no_engine_can_live_with_is_told_on_every_rank_at_once() -> None:
    expected = [("CommunicationError", (limited,)) for _ in TOO_LITTLE for limited in (0, 1)]

    assert run_ranks(2, connect_with_too_little) == [expected] * 2


def hide_devices() -> None:
    """Takes /dev, and with it /dev/shm, away from this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, nothing = 0x00020000, 0x00044000, None
    for result in (
        libc.unshare(new_mounts),
        libc.mount(b"none", b"/", nothing, private, nothing),
        libc.mount(b"none", b"/dev", b"tmpfs", 0, nothing),
    ):
        if result != 0:
            raise OSError(ctypes.get_errno(), "cannot hide /dev")
    assert not os.path.exists("/dev/shm")


def reduce_without_devices(store: Store, rank: int, size: int) -> list[str]:
    names = []
    for hiding in (1, 0):
        if rank == hiding:
            hide_devices()
        prefixed = PrefixStore(f"{hiding}", store)
        with connect(prefixed, rank, size, timeout_seconds=60) as communicator:
            total = torch.full((70_001,), rank + 1.0)
            communicator.all_reduce(ReduceOp.SUM, [total])
            assert bool((total == 3).all())
            communicator.barrier()
            names.append(communicator.name)
    return names


def test_hosts_without_dev_shm_share_memory_all_the_same() -> None:
    tool = shutil.which("unshare")
    if tool is None or subprocess.run([tool, "--mount", "true"], capture_output=True).returncode:
        pytest.skip("only root can hide /dev")
    # Of two ranks, one sees it and the other does not: they may be in different containers.
    assert run_ranks(2, reduce_without_devices) == [["Gloo", "shared memory"]] * 2


def measure(store: Store, rank: int, size: int) -> int:
    before = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    with connect(store, rank, size, timeout_seconds=30) as communicator:
        assert communicator.name == "shared memory"
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096 - before


def test_shared_memory_is_as_large_as_needed() -> None:
    for num_bytes in run_ranks(2, measure):
        assert num_bytes < 256 * MEBIBYTE
