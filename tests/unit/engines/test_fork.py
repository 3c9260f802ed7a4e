"""A strategy in a forked child has its own threads, or says that it cannot be used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from on_replica import replica_id
from torch import nn
from worker_threads import on_strategies

import unisono as uo
from unisono.errors import ContextError

Make = Callable[..., uo.MirroredStrategy]

# Python warns of every fork of a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

LIMIT_S = 60.0


def in_child(body: Callable[[], None]) -> int:
    """Forks, runs `body` in the child, and returns 0 if it did not raise there."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def summed() -> float:
    context = uo.get_replica_context()
    assert context is not None
    result: float = context.all_reduce("SUM", torch.ones(())).item()
    return result


@pytest.mark.parametrize("has_run", [False, True])
def test_a_child_gets_new_threads(mirrored: Make, has_run: bool) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = nn.Linear(2, 2)
    if has_run:
        strategy.run(summed)

    def body() -> None:
        for _ in range(2):
            assert strategy.run(summed).values == (3, 3, 3)
        assert strategy.run(lambda: model(torch.ones(1, 2)).shape) == (1, 2)
        strategy.close()

    assert in_child(body) == 0
    assert strategy.run(summed).values == (3, 3, 3)


def test_the_first_thing_that_replicas_of_a_child_do_is_differentiate() -> None:
    torch.ones((), requires_grad=True).exp().backward()

    def body() -> None:
        strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(4)])
        with strategy.scope():
            model = nn.Linear(2, 2)
        assert strategy.run(lambda: model(torch.ones(1, 2)).shape) == (1, 2)
        strategy.close()

    # torch makes a new engine in a child, which several threads must not do at once.
    assert [in_child(body) for _ in range(20)] == [0] * 20


def test_a_child_that_was_forked_in_a_step(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2)

    def body() -> None:
        with pytest.raises(ContextError, match="forked in the middle of a step"):
            summed()

    def step() -> int:
        status = in_child(body) if replica_id() == 1 else 0
        return status + int(summed()) - 2

    assert strategy.run(step) == 0
    assert type(model) is nn.Linear


def test_a_child_of_one_of_many_workers_is_no_worker() -> None:
    def on_worker(strategy: uo.Strategy) -> int:
        def body() -> None:
            for use in (
                lambda: strategy.run(summed),
                lambda: strategy.scope().__enter__(),
                lambda: strategy.reduce("SUM", uo.PerReplica([torch.ones(())])),
            ):
                with pytest.raises(ContextError, match="not a worker of the cluster"):
                    use()
            strategy.close()

        strategy.run(summed)
        return in_child(body)

    assert on_strategies(2, on_worker) == [0, 0]
