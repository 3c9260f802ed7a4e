"""Processes that mpirun has started, which live through many failures as those of a `Crew` do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from processes.crew import Member, leave_host, see_to_work, work

TESTS = Path(__file__).parents[1]
# Beside the interpreter, where pip puts it, or anywhere else.
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
HAS_MPI = MPIRUN is not None and find_spec("mpi4py") is not None
# Open MPI refuses otherwise to start for root, and would not let other processes have the core.
WISHES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PYTHONPATH": str(TESTS),
}
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SECONDS_TO_END = 20.0


class MpiMember(Member):
    """A process that mpirun has started."""

    def __init__(self, pipe: Connection, process_id: int) -> None:
        self.pipe = pipe
        self._process_id = process_id

    @property
    def process_id(self) -> int:
        return self._process_id

    def end(self) -> None:
        """Closes the connection, after which the process ends."""
        self.pipe.close()


class MpiCrew:
    """Members 0 to `size - 1` of one world of MPI; if one is killed, all are replaced.

    Each has a namespace for memory that processes share, as if it were on its own host.

    Args:
        size: How many there are.
        folder: For a socket.
        options: For mpirun.
    """

    def __init__(self, size: int, folder: Path, options: list[str]) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.members: list[Member] = []
        self._size = size
        self._command = [str(MPIRUN), *options, "-n", str(size), sys.executable, __file__]
        self._folder = folder
        self._start()

    def _start(self) -> None:
        path = self._folder / "socket"
        path.unlink(missing_ok=True)
        with Listener(str(path), "AF_UNIX", backlog=self._size) as listener:
            self._mpirun = subprocess.Popen(
                [*self._command, str(path), str(self.store.port)],
                env=os.environ | WISHES,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            members = {}
            for _ in range(self._size):
                pipe = listener.accept()
                rank, process_id = pipe.recv()
                members[rank] = MpiMember(pipe, process_id)
        self.members[:] = [members[rank] for rank in range(self._size)]
        see_to_work(self.members)
        for member in self.members:
            member.begin(leave_host)
        refusals = [refusal for member in self.members if (refusal := member.hear(30))]
        if refusals:
            self.__exit__()
            pytest.skip(f"this kernel or user can make no namespaces: {refusals[0]}")

    def replace(self, rank: int) -> None:
        """Starts a new world: no process can join one that exists."""
        self.__exit__()
        self._start()

    def __enter__(self) -> MpiCrew:
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            member.end()
        self._mpirun.terminate()
        try:
            self._mpirun.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._mpirun.kill()
            self._mpirun.wait()


def main(address: str, port: int) -> None:
    """What mpirun starts."""
    rank = next(int(os.environ[name]) for name in _RANKS if name in os.environ)
    with Client(address, "AF_UNIX") as pipe:
        pipe.send((rank, os.getpid()))
        work(pipe, port, None)
    # Members do not end together, and the end of MPI would wait for all.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
