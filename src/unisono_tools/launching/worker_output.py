"""Prints the lines of all workers, each after the name of its worker."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

_PAUSE_SECONDS = 0.05
# Progress bars end their lines with a carriage return.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n|$)")


@dataclass
class _Stream:
    path: Path
    prefix: bytes
    sink: BinaryIO
    position: int = 0
    rest: bytes = field(default=b"")

    def copy_new_lines(self) -> None:
        """Copies the lines that were completed since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.position)
            new = file.read()
        self.position += len(new)
        *lines, self.rest = _LINE_END.split(self.rest + new)
        self._write(lines)

    def copy_the_rest(self) -> None:
        """Copies the rest, a last line without a line end."""
        self.copy_new_lines()
        if self.rest:
            self._write([self.rest])
            self.rest = b""

    def _write(self, lines: Sequence[bytes]) -> None:
        self.sink.write(b"".join(self.prefix + line + b"\n" for line in lines))
        self.sink.flush()


class WorkerOutput(DefaultLogsSpecs):
    """Lets the agent write what workers print into files, and copies it from there.

    Args:
        folder: Where the files go.
        names: The names of the workers by local rank; `worker RANK` if not given.
        stdout: Where their standard output goes.
        stderr: Where their standard error goes.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], stdout: BinaryIO, stderr: BinaryIO
    ) -> None:
        super().__init__(log_dir=str(folder), redirects=Std.ALL)
        self._names = names
        self._sinks = (stdout, stderr)
        self._streams: list[_Stream] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="unisono-output", daemon=True)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`; called each time the workers start."""
        files = super().reify(envs)
        for local_rank, env in envs.items():
            self.follow(local_rank, env, files.stdouts[local_rank], files.stderrs[local_rank])
        return files

    def follow(self, local_rank: int, env: Mapping[str, str], *paths: str) -> None:
        """Copies what a worker writes into the files of its standard output and its errors."""
        prefix = f"[{self.name(local_rank, env)}] ".encode()
        for path, sink in zip(paths, self._sinks, strict=True):
            self._streams.append(_Stream(Path(path), prefix, sink))

    def name(self, local_rank: int, env: Mapping[str, str]) -> str:
        """Returns the name of a worker."""
        return self._names[local_rank] if self._names else f"worker {env['RANK']}"

    def last_lines(self, name: str, count: int) -> list[str]:
        """Returns the end of what a worker has last written to its standard error."""
        prefix = f"[{name}] ".encode()
        paths = [s.path for s in self._streams if s.prefix == prefix and s.sink is self._sinks[1]]
        text = paths[-1].read_text(errors="replace") if paths and paths[-1].exists() else ""
        return text.splitlines()[-count:]

    def __enter__(self) -> WorkerOutput:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        for stream in self._streams:
            stream.copy_the_rest()

    def _copy(self) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            for stream in list(self._streams):
                stream.copy_new_lines()


def in_words(status: int) -> str:
    """Returns how a worker has ended, given its status as Python counts it."""
    return f"by signal {-status}" if status < 0 else f"with status {status}"
