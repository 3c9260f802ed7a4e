"""MPI through mpi4py, where an MPI launcher has started the processes."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.stores import Countdown, connected, say_to_all
from unisono.errors import UnsupportedError

# What MPI launchers set for the processes that they start.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def is_launched_by_mpi() -> bool:
    """Whether an MPI launcher has started this process, and mpi4py is installed."""
    is_started = any(name in os.environ for name in _LAUNCHED)
    return is_started and importlib.util.find_spec("mpi4py") is not None


def mpi_ranks(
    store: Store, rank: int, size: int, *, timeout_seconds: float
) -> tuple[list[int], str]:
    """Returns the number of each rank in MPI's world, or an empty list and why there is none.

    Every rank calls this, after all have come: MPI waits for all processes when it starts, and does
    not hear Ctrl-C meanwhile.
    """
    try:
        mpi = import_mpi()
    except UnsupportedError as error:
        own = [0, 0, "", str(error)]
    else:
        world = mpi.COMM_WORLD
        takes_threads = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        why = "" if takes_threads else "MPI takes calls from one thread alone"
        job = os.environ.get("PMIX_NAMESPACE", "")
        own = [world.Get_rank(), world.Get_size(), job, why]
    texts = say_to_all(store, rank, size, json.dumps(own), timeout_seconds=timeout_seconds)
    numbers, sizes, jobs, reasons = zip(*map(json.loads, texts), strict=True)
    if any(reasons):
        return [], next(why for why in reasons if why)
    if len({*zip(sizes, jobs, strict=True)}) > 1 or len(set(numbers)) < size:
        return [], f"they are not in one world of MPI, whose sizes are {list(sizes)} by rank"
    return list(numbers), ""


def make_mpi_communicator(store: Store, rank: int, size: int, *, timeout_seconds: float) -> Any:
    """Returns a communicator of MPI that connects the ranks, apart from what the program sends."""
    mpi = import_mpi()
    left = Countdown(timeout_seconds)
    numbers, why = mpi_ranks(PrefixStore("mpi", store), rank, size, timeout_seconds=left.seconds())
    if not numbers:
        raise UnsupportedError(
            f"MPI cannot connect the {size} ranks: {why}. Start all workers with one mpirun of "
            "the MPI that mpi4py uses, or use another implementation."
        )

    def make(_: Any) -> Any:
        # Every rank of the group calls this.
        group = mpi.COMM_WORLD.Get_group().Incl(numbers)
        try:
            return mpi.COMM_WORLD.Create_group(group)
        finally:
            group.Free()

    made = connected(PrefixStore("mpi ends", store), rank, size, "MPI", make, left.seconds())
    made.Set_errhandler(mpi.ERRORS_RETURN)
    return made


def import_mpi() -> Any:
    """Returns mpi4py's module, which starts MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"MPI needs mpi4py and an MPI library that it can load ({error}). Install "
            "`unisono[mpi]`, or use another implementation."
        ) from error
    return MPI
