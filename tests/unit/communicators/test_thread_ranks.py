"""Failures between threads, which read like those between processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from thread_ranks import make_threads

from unisono.communicators.communicator import Communicator
from unisono.errors import (
    CommunicationError,
    UnequalCollectivesError,
    UnsupportedError,
    WorkerLostError,
    WorkerTimeoutError,
)
from unisono.options import ReduceOp


def errors(
    size: int, work: Callable[[Communicator], None], timeout_seconds: float = 60
) -> list[CommunicationError | None]:
    def run(communicator: Communicator) -> CommunicationError | None:
        try:
            work(communicator)
        except CommunicationError as error:
            return error
        return None

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, make_threads(size, timeout_seconds=timeout_seconds)))


def test_unequal_calls_are_told_on_every_rank() -> None:
    def work(communicator: Communicator) -> None:
        communicator.all_reduce(ReduceOp.SUM, [torch.ones(3 + (communicator.rank == 1))])

    for error in errors(3, work):
        assert isinstance(error, UnequalCollectivesError)
        assert error.ranks == (1,)


def test_a_rank_that_does_not_come_is_named() -> None:
    found = errors(3, lambda c: c.barrier() if c.rank != 1 else None, timeout_seconds=10)

    assert found[1] is None
    for error in (found[0], found[2]):
        assert isinstance(error, WorkerTimeoutError)
        assert error.ranks == (1,)
        assert "in barrier number 1 for rank 1 of 3" in str(error)


def test_a_rank_that_closed_is_named_at_once_and_health_tells() -> None:
    found = errors(3, lambda c: c.barrier() if c.rank != 1 else c.close())

    for error in (found[0], found[2]):
        assert isinstance(error, WorkerLostError)
        assert error.ranks == (1,)


def test_health_tells_who_has_closed() -> None:
    first, second = make_threads(2)
    first.check_health()
    second.close()

    with pytest.raises(WorkerLostError, match="rank 1 closed"):
        first.check_health()


def test_a_root_that_is_no_rank_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="rank from 0 to 1, got 2"):
        make_threads(2)[0].broadcast(torch.ones(1), root=2)
