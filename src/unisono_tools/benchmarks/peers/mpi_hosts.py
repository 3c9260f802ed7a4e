"""An MPI process on one of several hosts, which reduces through Unisono and through mpi4py.

    mpirun ... python -m unisono_tools.benchmarks.peers.mpi_hosts SOCKET ADDRESS PORT BYTES

unisono MPI   Unisono over MPI: shared memory inside a host, MPI between hosts
flat MPI      mpi4py's Allreduce between all processes

ADDRESS and PORT are those of a store of torch, BYTES is the most that will be reduced.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore, TCPStore

from unisono.communicators import connect
from unisono.options import ReduceOp
from unisono_tools.benchmarks.peers.crew import DEADLINE_S
from unisono_tools.benchmarks.peers.turns import Competitor, serve, sum_factor


def main(door: str, address: str, port: int, max_bytes: int) -> None:
    """Tells the benchmark which rank this is, and answers until the end."""
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    plain = torch.empty(max_bytes, dtype=torch.uint8)
    total = sum_factor(world.size)
    with Client(door) as pipe:
        pipe.send((world.rank, MPI.Get_library_version().split(",")[0].strip()))
        limit = timedelta(seconds=DEADLINE_S)
        store = PrefixStore("mpi", TCPStore(address, port, timeout=limit, wait_for_workers=False))
        with connect(store, world.rank, world.size, timeout_seconds=DEADLINE_S) as ours:
            assert "MPI" in ours.name, f"{ours.name} was chosen"
            memories = {"": plain, " in place": ours.allocate(max_bytes)}

            def prepare(num_bytes: int) -> dict[str, Competitor]:
                tensors = {
                    where: memory[:num_bytes].view(torch.float32)
                    for where, memory in memories.items()
                }
                data = tensors[""].numpy()
                flat = Competitor(partial(world.Allreduce, MPI.IN_PLACE, data), data, total)
                competitors = {
                    f"unisono MPI{where}": Competitor(
                        partial(ours.all_reduce, ReduceOp.SUM, [tensor]), tensor.numpy(), total
                    )
                    for where, tensor in tensors.items()
                }
                return {**competitors, "flat MPI": flat}

            with suppress(EOFError):  # The benchmark is gone.
                serve(pipe, world.rank, prepare, ours.barrier)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
