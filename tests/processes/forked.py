"""Processes that are forked from one that has loaded torch, which takes seconds."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from unisono_tools.processes import quick_processes

# Optimizers load the compiler of torch, which takes seconds, too.
PROCESSES = quick_processes("torch._dynamo", "unisono.strategies")


class ForkedProgram:
    """`python -m words...` in a new session; it has what tests use of `subprocess.Popen`."""

    def __init__(self, words: list[str], environ: dict[str, str]) -> None:
        pipes = [PROCESSES.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in pipes]
        self._process = PROCESSES.Process(target=_run_module, args=(words, environ, *writers))
        self._process.start()
        self.pid: int = self._process.pid
        for _, writer in pipes:
            writer.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno())) for reader, _ in pipes)
        for reader, _ in pipes:
            reader.close()
        # What ends the session must find it.
        with suppress(ProcessLookupError):
            while os.getpgid(self.pid) != self.pid:
                time.sleep(0.005)
        self._texts = ["", ""]
        self._readers: list[threading.Thread] = []

    @property
    def returncode(self) -> Any:
        return self._process.exitcode

    def poll(self) -> int | None:
        code: int | None = self.returncode
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what it has printed, as soon as it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(i,)) for i in range(2)]
            for reader in self._readers:
                reader.start()
        for part in (*self._readers, self._process):
            part.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self.returncode is None or any(reader.is_alive() for reader in self._readers):
            raise subprocess.TimeoutExpired("forked program", timeout or 0.0)
        return self._texts[0], self._texts[1]

    def _read(self, index: int) -> None:
        self._texts[index] = (self.stdout, self.stderr)[index].read()

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.join()
        for reader in self._readers:
            reader.join()
        self.stdout.close()
        self.stderr.close()


def _run_module(words: list[str], environ: dict[str, str], *outputs: Connection) -> None:
    os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
        output.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = list(words)
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        # A forked process does not do it by itself.
        atexit._run_exitfuncs()
