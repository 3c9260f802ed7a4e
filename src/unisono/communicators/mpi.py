"""MPI through mpi4py, where an MPI launcher has started the processes."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.stores import Countdown, connected, say_to_all
from unisono.errors import UnsupportedError

# What MPI launchers set for the processes that they start.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
# How soon the thread looks again after a call of the program, and how rarely after a long time.
_LEAST_SECONDS = 5e-3
_MOST_SECONDS = 0.1


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


class Progress:
    """A thread that lets MPI go on while the program does not call it; the first message starts it.

    MPI may say that a message is sent when it has only put it into a queue, and it works on the
    queue only while it is called. A rank that computes, or waits for others of its host, does not
    call it.

    Args:
        call: Calls MPI, which returns at once.

    Attributes:
        num_calls: How often the program has called MPI. It counts by itself.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.num_calls = 0
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, if it does not run."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unisono MPI", daemon=True)
                self._thread.start()
                # MPI ends after this, and must not be called then.
                atexit.register(self._stop)

    def _run(self) -> None:
        seconds, num_seen = _LEAST_SECONDS, -1
        while not self._end.wait(seconds):
            if self.num_calls != num_seen:
                seconds, num_seen = _LEAST_SECONDS, self.num_calls
            else:
                self._call()
                seconds = min(2 * seconds, _MOST_SECONDS)

    def _stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
