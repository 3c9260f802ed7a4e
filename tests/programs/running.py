"""Runs a program on one device, on the replicas of one process, and on several workers.

A program is a function of a strategy. It is written as it would be for one device, and returns what
it has learned, by name. On one device it is given `OneDevice`, which is plain PyTorch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from processes.crew import Crew, Desk
from processes.harness import strategy_of
from processes.ports import free_ports
from torch import Tensor

import unisono as uo

Learned = dict[str, Tensor]
Program = Callable[[Any], Learned]


class OneDevice:
    """Plain PyTorch, under the names by which the programs call a strategy."""

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return fn(*args)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        return dataset

    def reduce(self, reduce_op: str, value: Any, axis: int | None = None) -> Any:
        if axis is None:
            return value
        return value.sum(axis) if reduce_op == "SUM" else value.mean(axis)

    def mirror(self, made: Any) -> Any:
        return made

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class Settings(NamedTuple):
    """What a program asks of its strategy, and how it ends."""

    strategy: dict[str, Any]
    # The error that several replicas end with, and words of its message.
    error: type[Exception] | None = None
    words: tuple[str, ...] = ()
    # How far from one device the results may be, and what it computes in.
    tolerance: float = 1e-9
    dtype: torch.dtype = torch.float64
    # The package that it needs beside torch.
    package: str = "torch"


PROGRAMS: dict[str, tuple[Program, Settings]] = {}


def program(
    *,
    tolerance: float = 1e-9,
    dtype: torch.dtype = torch.float64,
    package: str = "torch",
    **settings: Any,
) -> Callable[[Program], Program]:
    """Adds a program, whose strategy is made with these settings."""

    def add(train: Program) -> Program:
        own = Settings(settings, tolerance=tolerance, dtype=dtype, package=package)
        PROGRAMS[train.__name__] = train, own
        return train

    return add


def refused(error: type[Exception], *words: str) -> Callable[[Program], Program]:
    """Adds a program that several replicas end with this error; its message has these words."""

    def add(train: Program) -> Program:
        PROGRAMS[train.__name__] = train, Settings({}, error, words)
        return train

    return add


class Outcome(NamedTuple):
    """What became of a program; as arrays, because it travels between processes."""

    learned: dict[str, np.ndarray[Any, Any]]
    error: str = ""
    message: str = ""
    traceback: str = ""


def outcome_of(name: str, strategy: Any) -> Outcome:
    """Runs a program, from the same seed wherever it runs."""
    train, settings = PROGRAMS[name]
    torch.manual_seed(1)
    try:
        with default_dtype(settings.dtype):
            learned = train(strategy)
    except Exception as error:
        return Outcome({}, type(error).__name__, str(error), traceback.format_exc())
    return Outcome({key: tensor.detach().cpu().numpy().copy() for key, tensor in learned.items()})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def on_one_device(name: str) -> Outcome:
    return outcome_of(name, OneDevice())


def on_replicas(name: str, num_replicas: int) -> Outcome:
    strategy = uo.MirroredStrategy(
        [f"cpu:{i}" for i in range(num_replicas)], **PROGRAMS[name][1].strategy
    )
    try:
        return outcome_of(name, strategy)
    finally:
        strategy.close()


def on_workers(crew: Crew, name: str, num_replicas: int) -> list[Outcome]:
    """Runs a program on all members of a crew, each with the same number of replicas."""
    ports = free_ports(len(crew.members))
    for rank, member in enumerate(crew.members):
        member.begin(_on_worker, name, rank, ports, num_replicas)
    return [member.hear(150) for member in crew.members]


def _on_worker(_: Desk, name: str, rank: int, ports: list[int], num_replicas: int) -> Outcome:
    import programs.all  # noqa: F401 - a member has none of the programs yet

    try:
        strategy = strategy_of(rank, ports, num_replicas, **PROGRAMS[name][1].strategy)
    except Exception as error:
        return Outcome({}, type(error).__name__, str(error), traceback.format_exc())
    try:
        return outcome_of(name, strategy)
    finally:
        strategy.close()
