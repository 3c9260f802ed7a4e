"""What a strategy of many workers says and obeys; the workers are threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_replica import replica
from thread_ranks import ThreadCommunicator
from worker_threads import communicator_of, on_strategies

import unisono as uo
from unisono.errors import ReplicaMismatchError, UnequalCallsError, WorkerTimeoutError
from unisono.experimental import CommunicationOptions


def raised_by(strategy: uo.Strategy, step: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        strategy.run(step)
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="there are no notes")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_errors_name_the_replica_by_its_number_over_all_workers(num_replicas: int) -> None:
    def fails() -> None:
        if replica().local_id == num_replicas - 1:
            raise LookupError

    first, second = on_strategies(
        2, lambda strategy: raised_by(strategy, fails, LookupError), num_replicas=num_replicas
    )
    last = num_replicas - 1
    assert f"Raised on replica {last} of worker 0 (cpu:{last})." in first
    assert f"Raised on replica {num_replicas + last} of worker 1 (cpu:{last})." in second


def test_unequal_calls_name_replicas_over_all_workers() -> None:
    def parts() -> None:
        if replica().local_id == 0:
            replica().merge_call(lambda strategy: None)

    _, second = on_strategies(
        2, lambda strategy: raised_by(strategy, parts, UnequalCallsError), num_replicas=2
    )
    assert "replica 2 of worker 1 is in merge_call()" in second
    assert "replica 3 of worker 1 has returned" in second


def test_values_that_do_not_go_together_name_replicas_over_all_workers() -> None:
    def reduce() -> None:
        replica().all_reduce("SUM", torch.ones(1 + replica().local_id // 2))

    def count() -> None:
        replica().all_reduce("SUM", [torch.ones(1)] * (1 + replica().local_id // 2))

    def train(strategy: uo.Strategy) -> tuple[str, str]:
        shapes = raised_by(strategy, reduce, ReplicaMismatchError)
        return shapes, raised_by(strategy, count, UnequalCallsError)

    _, (shapes, counts) = on_strategies(2, train, num_replicas=3)
    assert "worker 1" in shapes
    assert "replica 5 has (2,)" in shapes
    assert "replica 5 of worker 1 is in all_reduce(SUM) of 2 tensors" in counts


OPTIONS = CommunicationOptions(timeout_seconds=0.3)
CALLS: dict[str, Callable[[uo.Strategy], Any]] = {
    "all_reduce": lambda s: s.run(lambda: replica().all_reduce("SUM", torch.ones(1), OPTIONS)),
    "all_gather": lambda s: s.run(lambda: replica().all_gather(torch.ones(1), 0, OPTIONS)),
    "reduce_to": lambda s: s.extended.reduce_to("SUM", torch.ones(1), "cpu:0", OPTIONS),
    "batch_reduce_to": lambda s: s.extended.batch_reduce_to(
        "SUM", [(torch.ones(1), "cpu:0")], OPTIONS
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_timeout_of_one_call_is_obeyed(name: str) -> None:
    has_ended = threading.Event()

    def waits(strategy: uo.Strategy) -> None:
        # What others are given without options waits as long as ever.
        strategy.reduce("SUM", torch.ones(1))
        if strategy.extended.first_replica_id == 0:
            with pytest.raises(WorkerTimeoutError, match=r"Waited 0\.3 s"):
                CALLS[name](strategy)
            has_ended.set()
        else:
            assert has_ended.wait(60)

    # The others then find that the communicator has failed.
    with pytest.raises(WorkerTimeoutError):
        on_strategies(2, waits)


def test_a_timeout_is_that_of_one_call_alone() -> None:
    def patience(strategy: uo.Strategy) -> list[float]:
        communicator = communicator_of(strategy)
        assert isinstance(communicator, ThreadCommunicator)
        before = communicator.patience
        strategy.extended.reduce_to(
            "SUM", torch.ones(1), "cpu:0", CommunicationOptions(timeout_seconds=60)
        )
        return [before, communicator.patience]

    assert on_strategies(2, patience) == [[120.0, 120.0]] * 2
