"""Messages through MPI.

Requests are non-blocking, and this process itself asks whether they are done. So a wait has a
deadline, hears Ctrl-C and notices lost ranks, as far as MPI lets a job live: most launchers end all
processes when one of them dies.
"""

from __future__ import annotations

import atexit
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from unisono.communicators.mpi import Progress, import_mpi
from unisono.communicators.transport import BrokenConnectionError, Transport, pause

_TAG = 1
# A pause is never longer than this: MPI moves large messages only while it is asked.
_MOST_PAUSE_SECONDS = 1e-4

# Requests that a communicator has left behind. MPI may still read and write their memory.
_left_behind: list[Any] = []


def _call_mpi() -> None:
    mpi = import_mpi()
    # A program may end it, too.
    if not mpi.Is_finalized():
        mpi.COMM_SELF.Iprobe()


# One for all communicators, because what one has sent may still be queued when it is closed.
_progress = Progress(_call_mpi)


class MpiTransport(Transport):
    """Messages through MPI."""

    name = "MPI"

    def __init__(self, comm: Any, timeout_seconds: float) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._timeout_seconds = timeout_seconds
        self._mpi = import_mpi()
        self._comm = comm
        # The requests that are not done, with the rank that something is received from.
        self._under_way: dict[int, tuple[Any, int | None]] = {}

    def send(self, peer: int, data: Tensor) -> Any:
        buffer = [data.numpy(), self._mpi.BYTE]
        return self._begun(lambda comm: comm.Isend(buffer, peer, _TAG), None)

    def receive(self, peer: int, room: Tensor) -> Any:
        buffer = [room.numpy(), self._mpi.BYTE]
        return self._begun(lambda comm: comm.Irecv(buffer, peer, _TAG), peer)

    def _begun(self, begin: Any, peer: int | None) -> Any:
        if self._comm is None:
            raise BrokenConnectionError("another thread has closed it")
        _progress.start()
        _progress.num_calls += 1
        try:
            request = begin(self._comm)
        except self._mpi.Exception as error:
            raise BrokenConnectionError(str(error)) from error
        self._under_way[id(request)] = request, peer
        return request

    def progress(self, messages: Sequence[Any], seconds: float) -> bool:
        start = time.monotonic()
        while True:
            if self._comm is None:
                raise BrokenConnectionError("another thread has closed it")
            _progress.num_calls += 1
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
                    self._under_way.pop(id(message), None)
                return True
            passed = time.monotonic() - start
            if passed >= seconds:
                return False
            pause(passed, _MOST_PAUSE_SECONDS)

    def awaited(self) -> list[int]:
        peers = set()
        for request, peer in list(self._under_way.values()):
            with suppress(self._mpi.Exception):
                if peer is not None and not request.Test():
                    peers.add(peer)
        return sorted(peers)

    def set_timeout(self, seconds: float) -> None:
        """Sets how long the end of this process may wait for others after a failure."""
        self._timeout_seconds = seconds

    def close(self, *, has_failed: bool) -> None:
        """Leaves the communicator. After a failure it is kept, as others may not free it, too."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        if not has_failed:
            comm.Free()
            return
        for request, peer in self._under_way.values():
            with suppress(self._mpi.Exception):
                if peer is not None:
                    request.Cancel()
                if not request.Test():
                    _left_behind.append(request)
        self._under_way.clear()
        atexit.register(_limit_end, self._timeout_seconds)


def _limit_end(seconds: float) -> None:
    """Lets the end of MPI wait so long for other processes, some of which may never end.

    A thread cannot be started here, and a handler of Python would not run. The signal ends this
    process, and then the launcher ends all others.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
