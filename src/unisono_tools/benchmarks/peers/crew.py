"""Processes of a benchmark, one per rank, controlled over pipes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from unisono_tools.benchmarks.failure import BenchmarkError
from unisono_tools.processes import quick_processes

DEADLINE_S = 120.0
# How long a process may take to end; one that is still starting does not read the command.
PATIENCE_S = 5.0


class Crew:
    """Processes that run `target(rank, size, pipe, *arguments)` until they receive ("end",).

    Args:
        name: What errors call them.
        size: How many there are.
        target: What each runs; a function of a module.
        arguments: What it gets besides.
    """

    def __init__(self, name: str, size: int, target: Callable[..., None], *arguments: Any) -> None:
        self._name = name
        self._pipes: list[Connection] = []
        self._workers: list[BaseProcess] = []
        # Or the first process would start it, which lets Ctrl-C through.
        resource_tracker.ensure_running()
        try:
            for rank in range(size):
                self._start(rank, size, target, arguments)
        except BaseException:
            self.close()
            raise

    def _start(
        self, rank: int, size: int, target: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        # Optimizers load the compiler of torch, which takes seconds.
        context = quick_processes("torch._dynamo", "unisono.strategies")
        ours, theirs = context.Pipe()
        worker = context.Process(target=target, args=(rank, size, theirs, *arguments), daemon=True)
        with deaf_to_ctrl_c():
            worker.start()
            self._pipes.append(ours)
            self._workers.append(worker)
        theirs.close()

    def ask(self, *command: Any) -> list[Any]:
        """Sends a command to all, and returns their answers by rank."""
        return ask_all(self._name, self._pipes, command)

    def close(self) -> None:
        """Ends the processes, those that do not listen too."""
        dismiss(self._pipes)
        end = time.monotonic() + PATIENCE_S
        for worker in self._workers:
            worker.join(timeout=max(end - time.monotonic(), 0.0))
            if worker.is_alive():
                worker.kill()
                worker.join(timeout=10)
        for pipe in self._pipes:
            pipe.close()


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that are started here do not hear Ctrl-C; who started them does, and ends them."""
    # Blocked, not ignored: one that comes meanwhile is heard here when the block ends.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ask_all(name: str, pipes: Sequence[Connection], command: tuple[Any, ...]) -> list[Any]:
    """Sends a command into all pipes, and returns what comes back; an exception is raised."""
    for rank, pipe in enumerate(pipes):
        try:
            pipe.send(command)
        except OSError:
            raise BenchmarkError(
                f"{name}: rank {rank} died before {command[0]!r}. Check its messages above."
            ) from None
    waiting = {pipe.fileno(): rank for rank, pipe in enumerate(pipes)}
    answers: dict[int, Any] = {}
    end = time.monotonic() + DEADLINE_S
    # All at once: the others wait for a rank that died, and do not answer until they find out.
    while waiting:
        ready = wait(list(waiting), timeout=max(end - time.monotonic(), 0.0))
        if not ready:
            raise BenchmarkError(
                f"{name}: ranks {sorted(waiting.values())} did not answer {command[0]!r} in "
                f"{DEADLINE_S:g} s. Try again with fewer ranks or smaller sizes."
            )
        for rank in [waiting.pop(fd) for fd in ready if isinstance(fd, int)]:
            answers[rank] = _answer(f"{name}: rank {rank}", pipes[rank], command[0])
    return [answers[rank] for rank in range(len(pipes))]


def _answer(who: str, pipe: Connection, command: str) -> Any:
    try:
        answer = pipe.recv()
    except (EOFError, OSError):
        raise BenchmarkError(f"{who} died in {command!r}. Check its messages above.") from None
    if isinstance(answer, Exception):
        raise BenchmarkError(f"{who} failed in {command!r}:\n{answer}")
    return answer


def dismiss(pipes: Sequence[Connection]) -> None:
    """Tells those who still listen to end."""
    for pipe in pipes:
        with suppress(OSError):
            pipe.send(("end",))
