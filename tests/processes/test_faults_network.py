"""What survivors raise when a rank dies, stops, never comes or calls something else."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from keyboard import press_ctrl_c_in
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from processes.harness import Outcome, Ranks, outcome, run_ranks
from unisono.communicators.communicator import Communicator
from unisono.communicators.gloo import make_gloo_group
from unisono.communicators.network import NetworkCommunicator
from unisono.options import ReduceOp

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
TIMEOUT = 150.0
# Where it passes, all others must have come before, also on a busy machine.
SHORT = 12.0
# What a busy machine may take where nobody has to wait for the end of a timeout.
SECONDS_TO_NOTICE = 50.0


@pytest.fixture(params=["tcp", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    """What carries the messages, and with Gloo also those of the watch."""
    return str(request.param)


def make(
    store: Store,
    rank: int,
    size: int,
    prefix: str,
    timeout: float = TIMEOUT,
    backend: str = "tcp",
    joining: float = TIMEOUT,
) -> Communicator:
    own = PrefixStore(prefix, store)

    def gloo(check_health: Callable[[float], None]) -> Any:
        seconds: Any = {"timeout_seconds": timeout, "joining_seconds": joining}
        return make_gloo_group(own, rank, size, check_health=check_health, **seconds)

    return NetworkCommunicator(
        own,
        rank,
        size,
        backend=backend,
        timeout_seconds=timeout,
        joining_seconds=joining,
        gloo=gloo,
    )


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def summed(communicator: Communicator) -> float:
    total = torch.tensor(10.0**communicator.rank)
    communicator.all_reduce(SUM, [total])
    return total.item()


def left_behind(before: tuple[int, int]) -> str | None:
    """In words, what is here that was not before, after a moment."""
    deadline = time.monotonic() + 60
    while (now := descriptors_and_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    return None if now <= before else f"{before} became {now} (descriptors, threads)"


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def fail_and_build_again(
    store: Store, rank: int, size: int, backend: str
) -> dict[str, tuple[Outcome, float, str | None]]:
    """Makes every fault on its own communicator, each time with another one after it."""
    results = {}
    with make(store, rank, size, "warm-up", backend=backend) as communicator:
        communicator.barrier()
    for fault, call in FAULTS.items():
        before = descriptors_and_threads()
        communicator = make(store, rank, size, fault, backend=backend)
        summed(communicator)
        raised = outcome(functools.partial(call, communicator))
        start = time.monotonic()
        communicator.close()
        communicator.close()
        assert time.monotonic() - start < SECONDS_TO_NOTICE, "close took long"
        left = left_behind(before)
        with make(store, rank, size, f"{fault}, again", backend=backend) as communicator:
            results[fault] = raised, summed(communicator), left
            communicator.barrier()
    return results


def other_shape(communicator: Communicator) -> None:
    communicator.all_reduce(SUM, [ones(3, 4) if communicator.rank else ones(100_000, 5)])


def other_dtype(communicator: Communicator) -> None:
    dtype = torch.float64 if communicator.rank == 1 else torch.float32
    communicator.reduce_scatter(SUM, [ones(5, dtype=dtype)])


def other_op(communicator: Communicator) -> None:
    communicator.all_reduce(MEAN if communicator.rank == 1 else SUM, [ones(5)])


def other_order(communicator: Communicator) -> None:
    calls: list[Callable[[], None]] = [
        communicator.barrier,
        functools.partial(communicator.broadcast, ones(2)),
    ]
    for call in calls if communicator.rank == 1 else calls[::-1]:
        call()


def other_root(communicator: Communicator) -> None:
    communicator.gather(ones(2), root=communicator.rank)


FAULTS: dict[str, Callable[[Communicator], None]] = {
    "other shape": other_shape,
    "other dtype": other_dtype,
    "other op": other_op,
    "other order": other_order,
    "other root": other_root,
}
SAID = {
    "other shape": ((0,), ["rank 0", "(100000, 5)", "ranks 1 and 2", "(3, 4)"]),
    "other dtype": ((1,), ["ranks 0 and 2", "float32", "rank 1", "float64"]),
    "other op": ((1,), ["ranks 0 and 2", "sum of", "rank 1", "mean of"]),
    "other order": ((1,), ["broadcast number 2 from rank 0", "rank 1", "barrier number 2"]),
    "other root": ((0, 1, 2), ["gather number 2 to rank 0", "gather number 2 to rank 2"]),
}


def test_unequal_calls_are_told_on_every_rank_and_another_communicator_works(backend: str) -> None:
    for results in run_ranks(3, fail_and_build_again, backend):
        for fault, ((kind, message, at_fault, seconds), total, left) in results.items():
            ranks, words = SAID[fault]
            assert kind == "UnequalCollectivesError"
            assert at_fault == ranks
            assert [word for word in words if word not in message] == []
            assert seconds < SECONDS_TO_NOTICE
            assert total == 111.0
            assert left is None


def survive(
    store: Store, rank: int, size: int, timeout: float, backend: str
) -> tuple[Outcome, float]:
    """Loses rank 1 in the second collective, and goes on with the others."""
    communicator = make(store, rank, size, "first", timeout, backend)
    summed(communicator)
    store.set(f"ready/{rank}", "")
    if rank == 1:
        time.sleep(600)
    raised = outcome(lambda: summed(communicator))
    communicator.close()
    left = rank - (rank > 1)
    with make(store, left, size - 1, "second", backend=backend) as communicator:
        total = summed(communicator)
        communicator.barrier()
    return raised, total


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_worker_is_named_and_the_others_go_on(
    sign: signal.Signals, backend: str
) -> None:
    timeout = TIMEOUT if sign is signal.SIGKILL else SHORT
    with Ranks(3, survive, timeout, backend) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(3)], timedelta(seconds=60))
        os.kill(ranks.processes[1].pid or 0, sign)
        results = ranks.results(of=(0, 2))

    for (kind, message, at_fault, seconds), total in results.values():
        # A process that is stopped is alive, and only late.
        is_dead = sign is signal.SIGKILL
        assert kind == ("WorkerLostError" if is_dead else "WorkerTimeoutError")
        assert at_fault == (1,)
        assert "rank 1" in message
        assert "all_reduce number 2" in message
        assert seconds < SECONDS_TO_NOTICE + (0 if is_dead else timeout)
        assert total == 11.0


PAUSE_SECONDS = 11.0


def pause_and_hold(
    store: Store, rank: int, size: int, backend: str
) -> tuple[list[float], list[float]]:
    """Makes collectives while ranks are stopped from outside, or hold the interpreter lock."""
    # Half of the time would be long enough for a worker to look lost.
    with make(store, rank, size, "first", 1.9 * PAUSE_SECONDS, backend) as communicator:
        totals, seconds = [summed(communicator)], []
        for phase in range(2):
            store.set(f"ready/{phase}/{rank}", "")
            store.wait([f"go/{phase}"], timedelta(seconds=60))
            if (phase, rank) == (0, 2):
                ctypes.PyDLL(None).usleep(int(PAUSE_SECONDS * 1e6))
            start = time.monotonic()
            totals.append(summed(communicator))
            seconds.append(time.monotonic() - start)
            communicator.check_health()
        communicator.barrier()
    return totals, seconds


def test_a_worker_that_is_paused_or_holds_the_interpreter_lock_is_alive(backend: str) -> None:
    """In the first phase rank 1 is stopped and rank 2 holds the lock; in the second rank 0 is."""
    with Ranks(3, pause_and_hold, backend) as ranks:
        for phase, rank in enumerate([1, 0]):
            ranks.store.wait([f"ready/{phase}/{one}" for one in range(3)], timedelta(seconds=60))
            process = ranks.processes[rank].pid or 0
            os.kill(process, signal.SIGSTOP)
            ranks.store.set(f"go/{phase}", "")
            time.sleep(PAUSE_SECONDS)
            os.kill(process, signal.SIGCONT)
        results = ranks.results()

    assert [totals for totals, _ in results.values()] == [[111.0] * 3] * 3
    # The others did wait.
    assert results[0][1][0] > PAUSE_SECONDS / 2
    assert results[2][1][1] > PAUSE_SECONDS / 2


def lose_rank_0(store: Store, rank: int, size: int, backend: str) -> Outcome:
    """Loses the rank on which it is decided what has gone wrong."""
    communicator = make(store, rank, size, "first", backend=backend)
    summed(communicator)
    store.set(f"ready/{rank}", "")
    if rank == 0:
        store.wait([f"ready/{other}" for other in range(size)], timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGKILL)
    raised = outcome(lambda: summed(communicator))
    communicator.close()
    return raised


def test_a_dead_rank_0_is_named(backend: str) -> None:
    with Ranks(3, lose_rank_0, backend) as ranks:
        results = ranks.results(of=(1, 2))

    for kind, message, at_fault, seconds in results.values():
        assert (kind, at_fault) == ("WorkerLostError", (0,))
        assert "rank 0 has ended" in message
        assert "all_reduce number 2" in message
        assert seconds < SECONDS_TO_NOTICE


def wait_in_vain(store: Store, rank: int, size: int) -> list[Outcome]:
    """Rank 1 never makes the second call, though it lives."""
    with make(store, rank, size, "first") as communicator:
        summed(communicator)
        communicator.set_timeout(SHORT)
        if rank == 1:
            store.wait(["0 has failed", "2 has failed"], timedelta(seconds=60))
        raised = outcome(lambda: summed(communicator))
        store.set(f"{rank} has failed", "")
        return [raised]


def test_a_worker_that_does_not_call_is_named_with_what_each_was_doing() -> None:
    for ((kind, message, ranks, seconds),) in run_ranks(3, wait_in_vain):
        assert kind == "WorkerTimeoutError"
        assert ranks == (1,)
        assert "waited 12 s in all_reduce number 2: sum of 1 float32 tensor" in message
        assert "rank 1: between collectives, after number 1" in message
        assert seconds < SHORT + SECONDS_TO_NOTICE


def never_come(store: Store, rank: int, size: int) -> Outcome:
    return outcome(lambda: make(store, rank, size, "first", joining=SHORT))


def test_a_worker_that_never_came_is_named() -> None:
    with Ranks(3, never_come, skip=(1,)) as ranks:
        results = ranks.results()

    for kind, message, at_fault, seconds in results.values():
        assert (kind, at_fault) == ("WorkerTimeoutError", (1,))
        assert "for rank 1 of 3 to start" in message
        assert seconds < SHORT + SECONDS_TO_NOTICE


def leave_early(store: Store, rank: int, size: int) -> Outcome | None:
    with make(store, rank, size, "first") as communicator:
        summed(communicator)
        return None if rank == 1 else outcome(communicator.barrier)


def test_a_worker_that_closed_is_named() -> None:
    results = run_ranks(3, leave_early)

    for result in (results[0], results[2]):
        kind, message, at_fault, seconds = result
        assert (kind, at_fault) == ("WorkerLostError", (1,))
        assert "has closed its communicator" in message
        assert seconds < SECONDS_TO_NOTICE


def interrupt(store: Store, rank: int, size: int, backend: str) -> Outcome | str:
    with make(store, rank, size, "first", TIMEOUT, backend) as communicator:
        summed(communicator)
        if rank == 1:
            store.wait(["interrupted"], timedelta(seconds=60))
        if rank > 0:
            # What rank 0 had sent may come before the news that it left. Then the next one fails.
            return outcome(lambda: [communicator.barrier() for _ in range(2)])
        press_ctrl_c_in(communicator.barrier, after=1.0)
        store.set("interrupted", "")
        return "interrupted"


def test_ctrl_c_ends_a_wait_and_the_others_are_told(backend: str) -> None:
    first, *others = run_ranks(3, interrupt, backend)

    assert first == "interrupted"
    for kind, message, ranks, seconds in others:
        assert (kind, ranks) == ("WorkerLostError", (0,))
        assert "Rank 0 left barrier number 2 with KeyboardInterrupt" in message
        assert seconds < 1 + SECONDS_TO_NOTICE


def ask_until_it_fails(communicator: Communicator) -> None:
    """The end of a rank is known a moment later, on a busy machine a long one."""
    deadline = time.monotonic() + SECONDS_TO_NOTICE
    while time.monotonic() < deadline:
        communicator.check_health()
        time.sleep(0.05)


def ask_for_health(store: Store, rank: int, size: int) -> Outcome | None:
    with make(store, rank, size, "first") as communicator:
        communicator.check_health()
        summed(communicator)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome(functools.partial(ask_until_it_fails, communicator))


def test_health_is_answered_without_a_collective() -> None:
    with Ranks(3, ask_for_health) as ranks:
        results = ranks.results()

    assert sorted(results) == [0, 2]
    for kind, message, at_fault, seconds in results.values():
        assert (kind, at_fault) == ("WorkerLostError", (1,))
        assert "rank 1 has ended" in message
        assert seconds < SECONDS_TO_NOTICE


def come_twice(store: Store, rank: int, size: int) -> Outcome:
    return outcome(lambda: make(store, 0, 2 + rank, "first", joining=SHORT))


def test_a_rank_that_comes_twice_is_told() -> None:
    results = run_ranks(2, come_twice)

    assert sorted(kind for kind, *_ in results) == ["JobMismatchError", "WorkerTimeoutError"]


def count_differently(store: Store, rank: int, size: int) -> Outcome:
    return outcome(lambda: make(store, rank, size + rank, "first", joining=SHORT))


def test_ranks_that_count_differently_are_told() -> None:
    first, second = run_ranks(2, count_differently)

    assert first[0] == "JobMismatchError"
    assert "Rank 0 counts 2 ranks, but rank 1 counts 3" in first[1]
    assert second[0] == "WorkerTimeoutError"
