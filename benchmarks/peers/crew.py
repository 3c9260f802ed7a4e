"""Processes of a benchmark, one a rank, commanded over pipes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 120.0


class Crew:
    """Processes that run `target(rank, size, pipe, *arguments)` until they are told ("end",).

    Args:
        name: What errors call them.
        size: How many there are.
        target: What each runs; a function of a module.
        arguments: What it gets besides.
    """

    def __init__(self, name: str, size: int, target: Callable[..., None], *arguments: Any) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._workers = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=target, args=(rank, size, theirs, *arguments), daemon=True
            )
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)

    def ask(self, *command: Any) -> list[Any]:
        """Sends a command to all, and returns their answers by rank."""
        return ask_all(self._name, self._pipes, command)

    def close(self) -> None:
        """Ends the processes, those that do not answer too."""
        dismiss(self._pipes)
        for worker in self._workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.kill()
                worker.join(timeout=10)
        for pipe in self._pipes:
            pipe.close()


def ask_all(name: str, pipes: Sequence[Connection], command: tuple[Any, ...]) -> list[Any]:
    """Sends a command into all pipes, and returns what comes back; an exception is raised."""
    for pipe in pipes:
        pipe.send(command)
    answers = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(DEADLINE_S):
            raise TimeoutError(
                f"{name}: rank {rank} did not answer {command[0]!r} in {DEADLINE_S:g} s."
            )
        try:
            answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"{name}: rank {rank} died in {command[0]!r}.") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"{name}: rank {rank} failed in {command[0]!r}.") from answer
        answers.append(answer)
    return answers


def dismiss(pipes: Sequence[Connection]) -> None:
    """Tells those who still listen to end."""
    for pipe in pipes:
        with suppress(OSError):
            pipe.send(("end",))
