"""Processes that train one replica each, asked to prepare a case and to take steps of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeAlias

from torch import Tensor

from unisono_tools.benchmarks.peers.crew import Crew
from unisono_tools.benchmarks.peers.models import CASES, Case

Step: TypeAlias = Callable[[], Tensor]


class Trainers(Crew):
    """A crew whose processes call `serve_steps`."""

    def prepare(self, case: str, seed: int, num_steps: int) -> list[float]:
        """Builds the model of a case; returns the mean loss of each of its first steps."""
        answers = self.ask("prepare", case, seed, num_steps)
        return [sum(losses) / len(losses) for losses in zip(*answers, strict=True)]

    def steps(self, num_steps: int) -> None:
        """Takes steps, and returns when all processes have."""
        self.ask("steps", num_steps)


def serve_steps(pipe: Connection, build: Callable[[Case, int], Step]) -> None:
    """Answers until the end, or until the benchmark is gone.

    Args:
        pipe: Where commands come from.
        build: Makes one step of a case, given a seed for the model.
    """
    with suppress(EOFError):
        _serve(pipe, build)


def _serve(pipe: Connection, build: Callable[[Case, int], Step]) -> None:
    step: Step | None = None
    while True:
        command, *arguments = pipe.recv()
        if command == "end":
            return
        if command == "prepare":
            name, seed, num_steps = arguments
            step = build(CASES[name], seed)
            pipe.send([float(step()) for _ in range(num_steps)])
        else:
            assert step is not None
            for _ in range(arguments[0]):
                step()
            pipe.send(None)
