"""MPI through mpi4py, where an MPI launcher has started the processes.

Requests are non-blocking, and this process looks for the end of them itself: so a wait has a
deadline, hears Ctrl-C and notices lost ranks, as far as MPI lets a job live.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unisono.communicators.transport import BrokenConnectionError
from unisono.errors import UnsupportedError

# What MPI launchers set for the processes that they start.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
_TAG = 1
# So long a wait asks again and again; then it sleeps in between, for longer and longer.
_SPIN_SECONDS = 50e-6
_MOST_SLEEP_SECONDS = 1e-3


def is_launched_by_mpi() -> bool:
    """Whether an MPI launcher has started this process, and mpi4py is installed."""
    is_started = any(name in os.environ for name in _LAUNCHED)
    return is_started and importlib.util.find_spec("mpi4py") is not None


class MpiTransport:
    """Messages through MPI.

    Args:
        rank: Which rank this is.
        ranks: The number of each rank in MPI's world.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.name = "MPI"
        self.rank = rank
        self.size = len(ranks)
        self._mpi = _import_mpi()
        world = self._mpi.COMM_WORLD
        if world.Get_rank() != ranks[rank] or world.Get_size() <= max(ranks):
            raise UnsupportedError(
                f"MPI counts this process as rank {world.Get_rank()} of {world.Get_size()}, the "
                f"cluster as rank {ranks[rank]}. Start the workers with mpirun in the order of the "
                "cluster."
            )
        # Apart from what the program itself sends. Every rank of the group calls this.
        group = world.Get_group().Incl(list(ranks))
        self._comm = world.Create_group(group)
        group.Free()
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._receives: dict[Any, int] = {}

    def send(self, peer: int, data: Tensor) -> Any:
        """Begins to send bytes."""
        return self._begun(lambda comm: comm.Isend([data.numpy(), self._mpi.BYTE], peer, _TAG))

    def receive(self, peer: int, room: Tensor) -> Any:
        """Begins to receive a message, which is at most as long as `room`."""
        request = self._begun(lambda comm: comm.Irecv([room.numpy(), self._mpi.BYTE], peer, _TAG))
        self._receives[id(request)] = peer
        return request

    def _begun(self, begin: Any) -> Any:
        if self._comm is None:
            raise BrokenConnectionError("another thread has closed it")
        try:
            return begin(self._comm)
        except self._mpi.Exception as error:
            raise BrokenConnectionError(str(error)) from error

    def progress(self, messages: Sequence[Any], seconds: float) -> bool:
        """Asks MPI until `messages` are done or the time is over; returns whether they are."""
        start = time.monotonic()
        sleep = 1e-5
        while True:
            if self._comm is None:
                raise BrokenConnectionError("another thread has closed it")
            try:
                if messages:
                    is_done = self._mpi.Request.Testall(list(messages))
                else:
                    # Any call lets MPI move what was begun.
                    self._comm.Iprobe()
                    is_done = True
            except self._mpi.Exception as error:
                raise BrokenConnectionError(str(error)) from error
            if is_done:
                for message in messages:
                    self._receives.pop(id(message), None)
                return True
            passed = time.monotonic() - start
            if passed >= seconds:
                return False
            if passed > _SPIN_SECONDS:
                time.sleep(min(sleep, seconds - passed))
                sleep = min(2 * sleep, _MOST_SLEEP_SECONDS)

    def awaited(self) -> list[int]:
        """Returns the ranks from which something is still to come."""
        return sorted(set(self._receives.values()))

    def set_timeout(self, seconds: float) -> None:
        """Does nothing: MPI never gives up by itself."""

    def close(self, *, has_failed: bool) -> None:
        """Leaves the communicator. After a failure it is kept, as others may not free it, too."""
        comm, self._comm = self._comm, None
        if comm is not None and not has_failed:
            comm.Free()


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"MPI needs mpi4py and an MPI library that it can load ({error}). Install "
            "`unisono[mpi]`, or use another implementation."
        ) from error
    return MPI
