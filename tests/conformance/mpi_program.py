"""What mpirun starts: the cases of all communicators over MPI, and ranks that fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from conformance.communicator_cases import failed_cases
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from unisono.communicators import connect
from unisono.communicators.communicator import Communicator
from unisono.communicators.network import NetworkCommunicator
from unisono.errors import CommunicationError
from unisono.options import ReduceOp

SECONDS = 60.0
LIMIT = timedelta(seconds=SECONDS)


def make(store: Store, rank: int, size: int, timeout_seconds: float) -> NetworkCommunicator:
    return NetworkCommunicator(
        store,
        rank,
        size,
        backend="mpi",
        timeout_seconds=timeout_seconds,
        joining_seconds=SECONDS,
    )


def raised(communicator: Communicator) -> str:
    """The error of the second of two collectives."""
    try:
        communicator.all_reduce(ReduceOp.SUM, [torch.ones(1 << 20)])
    except CommunicationError as error:
        return f"{type(error).__name__} {error.ranks}"
    return "nothing"


def cases(store: Store, rank: int, size: int) -> str:
    """All collectives, a group of some ranks, and a rank that comes when the others have failed."""
    with make(PrefixStore("cases", store), rank, size, SECONDS) as communicator:
        assert communicator.name == "MPI"
        failed = failed_cases(communicator, slice(0, None, 4))
        communicator.barrier()
    if rank > 0:
        # The ranks of a group are other ranks of MPI's world.
        with make(PrefixStore("some", store), rank - 1, size - 1, SECONDS) as communicator:
            total = torch.tensor([float(rank)])
            communicator.all_reduce(ReduceOp.SUM, [total])
            assert total.item() == size * (size - 1) / 2
            communicator.barrier()
    late = make(PrefixStore("late", store), rank, size, 3.0)
    late.barrier()
    if rank == 1:
        store.wait(["failed"], LIMIT)
    told = raised(late)
    store.set("failed", "")
    late.close()
    again = make(PrefixStore("again", store), rank, size, SECONDS)
    again.barrier()
    again.close()
    return f"failed {failed}, then {told}"


def stuck(store: Store, rank: int, size: int) -> str:
    """Rank 1 never comes and never ends."""
    communicator = make(store, rank, size, 3.0)
    communicator.barrier()
    if rank == 1:
        time.sleep(600)
    told = raised(communicator)
    communicator.close()
    return told


def killed(store: Store, rank: int, size: int) -> str:
    """Rank 1 dies."""
    communicator = make(store, rank, size, SECONDS)
    communicator.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = raised(communicator)
    communicator.close()
    return told


def chosen(store: Store, rank: int, size: int) -> str:
    """What connects the ranks of several hosts."""
    with connect(store, rank, size, timeout_seconds=SECONDS) as communicator:
        failed = failed_cases(communicator, slice(0, None, 10))
        communicator.barrier()
        return f"{communicator.name}, failed {failed}"


def large(store: Store, rank: int, size: int) -> str:
    """All-reduces after which ranks wait inside their hosts, while MPI has not sent everything."""
    with connect(store, rank, size, timeout_seconds=SECONDS) as communicator:
        for _ in range(3):
            total = torch.full((1 << 24,), rank + 1.0)
            communicator.all_reduce(ReduceOp.SUM, [total])
            assert total.unique().tolist() == [size * (size + 1) / 2]
        communicator.barrier()
    return "done"


PROGRAMS: list[Callable[[Store, int, int], str]] = [cases, stuck, killed, chosen, large]


def main(name: str, address: str, port: int, folder: str) -> None:
    """Writes down what a program returns; the outputs of several ranks would get mixed up."""
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    torch.set_num_threads(1)
    store = TCPStore(address, port, None, rank == 0, LIMIT, wait_for_workers=False)
    (program,) = [one for one in PROGRAMS if one.__name__ == name]
    told = program(PrefixStore("program", store), rank, size)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(told)
    # Rank 0 serves the store, and ends last of those that live.
    store.set(f"done/{rank}", "")
    alive = [r for r in range(size) if r != 1 or name in ("cases", "chosen", "large")]
    store.wait([f"done/{r}" for r in alive], LIMIT)
    if rank == 0:
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
