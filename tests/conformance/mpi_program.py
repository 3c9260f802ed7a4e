"""What mpirun starts: the cases of all communicators over MPI, and a rank that is late."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
from conformance.communicator_cases import failed_cases
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore, TCPStore

from unisono.communicators.network import NetworkCommunicator
from unisono.errors import CommunicationError
from unisono.options import ReduceOp

SECONDS = 60.0


def main(port: int) -> None:
    """Prints what is wrong, or that all is well."""
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    limit = timedelta(seconds=SECONDS)
    store = TCPStore("127.0.0.1", port, None, rank == 0, limit, wait_for_workers=False)
    own = PrefixStore("cases", store)
    with NetworkCommunicator(
        own, rank, size, backend="mpi", timeout_seconds=SECONDS
    ) as communicator:
        assert communicator.name == "MPI"
        failed = failed_cases(communicator, slice(0, None, 4))
        communicator.barrier()
    late = NetworkCommunicator(
        PrefixStore("late", store),
        rank,
        size,
        backend="mpi",
        timeout_seconds=3.0,
        joining_seconds=SECONDS,
    )
    raised = ""
    try:
        if rank == 1:
            # Until the others have given up.
            store.wait(["failed"], limit)
        late.all_reduce(ReduceOp.SUM, [torch.ones(3)])
    except CommunicationError as error:
        raised = f"{type(error).__name__} {error.ranks}"
    store.set("failed", "")
    late.close()
    store.set(f"done/{rank}", "")
    store.wait([f"done/{other}" for other in range(size)], limit)
    print(f"rank {rank}: failed {failed}, then {raised}", flush=True)
    time.sleep(0.5)
    # Messages that nobody receives any more would keep MPI from ending.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
