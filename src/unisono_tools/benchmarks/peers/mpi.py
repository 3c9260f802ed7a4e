"""MPI through mpi4py, in a separate interpreter and under its own launcher."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from unisono_tools.benchmarks.failure import BenchmarkError
from unisono_tools.benchmarks.peers.crew import ask_all, deaf_to_ctrl_c, dismiss
from unisono_tools.namespaces import Hosts, mpirun_between

_RANKS = Path(__file__).with_name("mpi_ranks.py")
_BETWEEN_HOSTS = "unisono_tools.benchmarks.peers.mpi_hosts"
_START_S = 60.0


class Mpi:
    """Processes under `mpirun`, commanded as a `Crew` is.

    Args:
        size: How many there are.
        launcher: The words of the command that starts them, up to `-n`.
        interpreter: A Python with mpi4py and numpy; between hosts also with Unisono.
        hosts: The hosts that share the processes; this one if not given.
        arguments: Between hosts, what `mpi_hosts` gets besides the socket.
    """

    def __init__(
        self,
        size: int,
        launcher: list[str],
        interpreter: str,
        hosts: Hosts | None = None,
        arguments: Sequence[object] = (),
    ) -> None:
        self._pipes: list[Connection] = []
        with (
            tempfile.TemporaryDirectory(prefix="unisono-mpi-") as folder,
            _listener(folder) as door,
        ):
            try:
                if hosts is None:
                    command = [*launcher, "-n", str(size), interpreter, str(_RANKS)]
                else:
                    command = mpirun_between(hosts, launcher, size, Path(folder))
                    command += [interpreter, "-m", _BETWEEN_HOSTS]
                with deaf_to_ctrl_c():
                    self._process = subprocess.Popen(
                        [*command, door.getsockname(), *map(str, arguments)],
                        stdin=subprocess.DEVNULL,
                    )
            except OSError as error:
                raise BenchmarkError(
                    f"MPI: {launcher} cannot be started: {error}. Check `--mpirun`."
                ) from None
            try:
                self._let_in(door, size)
            except BaseException:
                self.close()
                raise

    def _let_in(self, door: socket.socket, size: int) -> None:
        deadline = time.monotonic() + _START_S
        arrived: dict[int, Connection] = {}
        while len(arrived) < size:
            try:
                connection, _ = door.accept()
            except TimeoutError:
                if self._process.poll() is None and time.monotonic() < deadline:
                    continue
                raise BenchmarkError(
                    f"{len(arrived)} of {size} MPI processes started before the launcher ended or "
                    f"{_START_S:g} s had passed. Check its messages above, and try `--mpi` and "
                    "`--mpirun` by hand, or leave MPI out with `--mpi ''`."
                ) from None
            pipe = Connection(connection.detach())
            self._pipes.append(pipe)
            rank, self.library = pipe.recv()
            arrived[rank] = pipe
        self._pipes = [arrived[rank] for rank in range(size)]

    def ask(self, *command: Any) -> list[Any]:
        """Sends a command to all, and returns their answers by rank."""
        return ask_all("MPI", self._pipes, command)

    def close(self) -> None:
        """Ends the processes."""
        dismiss(self._pipes)
        try:
            self._process.wait(timeout=20 if self._pipes else 1)
        except subprocess.TimeoutExpired:
            # The launcher ends its processes.
            self._process.terminate()
            self._process.wait(timeout=20)
        for pipe in self._pipes:
            pipe.close()


def _listener(folder: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(Path(folder) / "door"))
    door.listen()
    door.settimeout(1.0)
    return door
