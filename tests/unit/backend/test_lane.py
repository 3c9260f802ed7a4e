from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from unisono.backend.engine import Lane
from unisono.errors import WorkerLostError, WorkerTimeoutError
from unisono.groups.work import CollectiveWork

DEADLINE = timedelta(seconds=10)


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("test-lane")
    yield lane
    lane.close()


def add_one(tensor: Tensor) -> None:
    tensor += 1


def nothing() -> None:
    pass


def test_what_is_awaited_runs_on_the_thread_that_waits(lane: Lane) -> None:
    threads: list[threading.Thread] = []
    work = CollectiveWork("probe", lambda: threads.append(threading.current_thread()), [])

    lane.run(work, is_awaited=True)

    assert work.is_completed()
    assert threads == [threading.current_thread()]


def test_what_is_not_awaited_runs_on_one_thread_of_its_own(lane: Lane) -> None:
    threads: list[threading.Thread] = []
    are_given = threading.Event()

    def probe() -> None:
        assert are_given.wait(DEADLINE.total_seconds())
        threads.append(threading.current_thread())

    works = [CollectiveWork("probe", probe, []) for _ in range(3)]
    for work in works:
        lane.run(work, is_awaited=False)
    are_given.set()

    assert all(work.wait(DEADLINE) for work in works)
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_what_is_awaited_does_not_overtake(lane: Lane) -> None:
    gate = threading.Event()
    order: list[int] = []

    def first() -> None:
        gate.wait(10)
        order.append(1)

    lane.run(CollectiveWork("first", first, []), is_awaited=False)
    second = CollectiveWork("second", lambda: order.append(2), [])
    lane.run(second, is_awaited=True)
    assert order == []
    gate.set()

    assert second.wait(DEADLINE)
    assert order == [1, 2]


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_callback_may_wait_for_a_collective_of_its_own(lane: Lane, is_awaited: bool) -> None:
    gate = threading.Event()
    order: list[str] = []

    def ask_again(_: object) -> list[Tensor]:
        inner = CollectiveWork("inner", lambda: order.append("inner"), [])
        lane.run(inner, is_awaited=is_awaited)
        return inner.get_future().wait()

    first = CollectiveWork("first", lambda: order.append(f"first {gate.wait(10)}"), [])
    last = CollectiveWork("last", lambda: order.append("last"), [])
    future = first.get_future().then(ask_again)
    lane.run(first, is_awaited=False)
    lane.run(last, is_awaited=False)
    gate.set()

    assert last.wait(DEADLINE)
    assert future.done()
    assert order == ["first True", "inner", "last"]


def test_closing_waits_for_what_was_given_and_may_be_repeated() -> None:
    lane = Lane("test-lane")
    works = [CollectiveWork("probe", nothing, []) for _ in range(5)]
    for work in works:
        lane.run(work, is_awaited=False)

    lane.close()
    lane.close()

    assert all(work.is_success() for work in works)


def test_an_error_does_not_keep_the_next_from_running(lane: Lane) -> None:
    def lose() -> None:
        raise WorkerLostError("rank 1 is lost", [1])

    lost, next_one = CollectiveWork("lost", lose, []), CollectiveWork("next", nothing, [])
    lane.run(lost, is_awaited=False)
    lane.run(next_one, is_awaited=False)

    assert next_one.wait(DEADLINE)
    with pytest.raises(WorkerLostError, match="rank 1 is lost"):
        lost.wait(DEADLINE)
    assert lost.is_completed()
    assert not lost.is_success()
    assert isinstance(lost.exception(), WorkerLostError)


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_future_has_the_tensors_whenever_it_is_asked_for(asked: str) -> None:
    tensor = torch.zeros(2)
    work = CollectiveWork("probe", lambda: add_one(tensor), [tensor])
    future = work.get_future() if asked == "before" else None
    assert future is None or not future.done()

    work.run()

    future = work.get_future()
    assert future.done()
    assert future.wait()[0] is tensor
    assert work.result() == [tensor]
    assert future.then(lambda done: done.value()[0].sum().item()).wait() == 2


def test_a_future_fails_with_the_work() -> None:
    def lose() -> None:
        raise WorkerLostError("rank 1 is lost", [1])

    work = CollectiveWork("lost", lose, [])
    future = work.get_future()
    work.run()

    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        future.wait()


def test_waiting_ends_in_time() -> None:
    work = CollectiveWork("allreduce", nothing, [])

    with pytest.raises(WorkerTimeoutError, match=r"allreduce timed out.* 0\.01 s"):
        work.wait(timedelta(seconds=0.01))

    assert not work.is_completed()
    assert work.exception() is None


def test_the_thread_ends_when_there_is_nothing_to_do_and_another_comes(lane: Lane) -> None:
    threads: list[threading.Thread] = []
    for _ in range(2):
        work = CollectiveWork("probe", lambda: threads.append(threading.current_thread()), [])
        lane.run(work, is_awaited=False)
        assert work.wait(DEADLINE)
        threads[-1].join(DEADLINE.total_seconds())

    assert not any(thread.is_alive() for thread in threads)
    assert threads[0] is not threads[1]
