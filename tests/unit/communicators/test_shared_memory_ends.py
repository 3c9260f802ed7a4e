"""What is left of shared memory when ranks fork, close or are killed: nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from processes.harness import Ranks, run_ranks
from torch._C._distributed_c10d import HashStore, Store

from unisono.errors import (
    ContextError,
)
from unisono.kernels import native_core
from unit.communicators.shared_ranks import join, kill, report

pytestmark = pytest.mark.skipif(
    native_core().kernel is None, reason=f"needs the native core: {native_core().status}"
)


def use_in_a_forked_child(store: Store, rank: int, size: int) -> bool:
    with join(store, rank, size) as communicator:
        pid = os.fork()
        if pid == 0:
            refused = report(communicator.barrier).kind is ContextError
            communicator.close()
            os._exit(0 if refused else 1)
        _, status = os.waitpid(pid, 0)
        communicator.barrier()
        return status == 0


def test_a_forked_child_may_not_use_it_nor_harm_it() -> None:
    assert run_ranks(2, use_in_a_forked_child) == [True, True]


def test_after_close_it_says_so() -> None:
    communicator = join(HashStore(), 0, 1)
    communicator.close()
    communicator.close()

    with pytest.raises(ContextError, match="closed"):
        communicator.barrier()


def wait_to_be_killed(store: Store, rank: int, size: int) -> None:
    communicator = join(store, rank, size)
    communicator.allocate(1 << 20).fill_(1)
    store.set(f"sockets {rank}", " ".join(own_sockets()))
    communicator.barrier()
    time.sleep(60)


def own_sockets() -> set[str]:
    """The inodes of the sockets that this process has open."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return {link[8:-1] for link in links if link.startswith("socket:")}


def test_nothing_stays_when_all_ranks_are_killed() -> None:
    files = names_of_files()
    with Ranks(2, wait_to_be_killed) as ranks:
        ranks.store.wait(["sockets 0", "sockets 1"])
        sockets = {one for rank in range(2) for one in ranks.store.get(f"sockets {rank}").split()}
        for rank in range(2):
            kill(ranks, rank, signal.SIGKILL)
        assert ranks.results() == {}

    left = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    assert not {one.decode() for one in sockets} & left
    assert names_of_files() <= files
    assert not multiprocessing.active_children()


def names_of_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "unisono" in name}
