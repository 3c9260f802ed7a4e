"""Processes that are forked from one that has loaded torch, which takes seconds."""

from __future__ import annotations

import atexit
import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from unisono_tools.processes import quick_processes

# Optimizers load the compiler of torch, which takes seconds, too. Modules of tests import pytest.
PROCESSES = quick_processes(
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "unisono.strategies",
    "unisono.experimental",
    "unisono_tools.launching.board",
    "unisono_tools.namespaces",
    "pytest",
)


class ForkedProgram:
    """`python words...` in a new session; it has what tests use of `subprocess.Popen`.

    What torch's elastic agent starts in it, as the workers of a launcher, is forked, too.
    """

    def __init__(self, words: list[str], environ: dict[str, str]) -> None:
        pipes = [PROCESSES.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in pipes]
        self._process = PROCESSES.Process(target=_run_program, args=(words, environ, *writers))
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


def _run_program(words: list[str], environ: dict[str, str], *outputs: Connection) -> None:
    os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
        output.close()
    vars(subprocess_handler)["Popen"] = _ForkedWorker
    _become_python(words, environ)


class _ForkedWorker(subprocess.Popen[str]):
    """A child of this process that goes on as another program of Python, without loading torch."""

    def _execute_child(self, args: Sequence[str], *settings: Any) -> None:
        # A signal waits until the child has its own handlers: those of the agent end its workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with warnings.catch_warnings():
            # Python warns of the threads of this process, which the child does not need.
            warnings.simplefilter("ignore")
            self.pid = os.fork()
        if self.pid == 0:
            _begin_worker(args, settings[5], before, settings[12], settings[14])
        # What ends the session must find it.
        with suppress(ProcessLookupError):
            while os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._child_created = True


def _begin_worker(
    args: Sequence[str], environ: dict[str, str], mask: set[int | signal.Signals], *outputs: int
) -> NoReturn:
    # What this process has inherited from its parent must stay as it is until it ends: its files
    # are closed, and others may get their numbers.
    gc.freeze()
    for one in list(vars(weakref.finalize)["_registry"]):
        one.atexit = False
    os.setsid()
    for number, output in enumerate(outputs, start=1):
        if output != -1:
            os.dup2(output, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    vars(os)["execv"] = _go_on_as
    _go_on_as(args[0], args, environ)


def _go_on_as(path: str, words: Sequence[str], environ: dict[str, str] | None = None) -> NoReturn:
    """Runs `python words[1:]` to its end, and ends the process as Python does."""
    assert path == sys.executable, f"{path} is not the Python of this process"
    code = 1
    try:
        _become_python(list(words[1:]), dict(os.environ) if environ is None else environ)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        else:
            code = error.code or 0
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        if code < 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code & 255)


def _become_python(words: list[str], environ: dict[str, str]) -> None:
    """Does what `python words...` does."""
    for number, name in enumerate(("stdout", "stderr"), start=1):
        # Each line is one write, as several workers may write to one pipe.
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, line_buffering=True))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    while words[0] in ("-u", "-I", "-S"):
        words = words[1:]
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        # A forked process does not do it by itself.
        vars(threading)["_shutdown"]()
        atexit._run_exitfuncs()
