"""Workers that agree on their last step, whatever each of them is doing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from worker_threads import on_workers

from unisono.checkpoints import checkpoint
from unisono.checkpoints.agreement import Agreement, Notice, TerminationConfig
from unisono.communicators import TracedCommunicator
from unisono.communicators.job_store import local_store
from unisono.errors import CommunicationError
from unisono.workers import ConnectedWorkers

DEADLINE_SECONDS = 60.0


def on_agreements(size: int, target: Callable[[int, Agreement, threading.Event], int]) -> list[int]:
    """Calls `target` for each rank, with an event that tells this rank to stop once it is set."""
    store = local_store()

    def call(workers: ConnectedWorkers) -> int:
        one = workers.communicator
        told = threading.Event()
        notice = Notice(TerminationConfig(termination_watcher_fn=told.is_set))
        agreement = Agreement(notice, (TracedCommunicator(one, group=3), store))
        try:
            return target(one.rank, agreement, told)
        finally:
            # All have answered before one closes.
            agreement.close()

    return on_workers(size, call)


@pytest.mark.parametrize("seed", range(3))
def test_all_stop_after_the_same_step_although_none_waits_for_another(seed: int) -> None:
    rng = random.Random(seed)
    pauses = [rng.random() * 0.02 for _ in range(3)]
    tellers = rng.sample(range(3), k=1 + seed % 3)

    def train(rank: int, agreement: Agreement, told: threading.Event) -> int:
        deadline = time.monotonic() + DEADLINE_SECONDS
        for step in range(1, 1_000_000):
            assert time.monotonic() < deadline
            agreement.begin()
            time.sleep(pauses[rank])
            if step == 3 and rank in tellers:
                told.set()
            if agreement.end():
                return step
        raise AssertionError

    steps = on_agreements(3, train)

    assert len(set(steps)) == 1
    assert steps[0] >= 3


def test_a_worker_that_has_finished_lets_the_others_finish(
    caplog: pytest.LogCaptureFixture,
) -> None:
    has_finished = threading.Event()

    def train(rank: int, agreement: Agreement, told: threading.Event) -> int:
        if rank == 0:
            agreement.close()
            has_finished.set()
            return 0
        assert has_finished.wait(DEADLINE_SECONDS)
        told.set()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while "already finished" not in caplog.text:
            assert time.monotonic() < deadline
            agreement.begin()
            time.sleep(0.01)
            assert not agreement.end()
        agreement.begin()
        return int(agreement.end())

    assert on_agreements(2, train) == [0, 0]


def test_a_failed_step_does_not_count() -> None:
    def train(rank: int, agreement: Agreement, told: threading.Event) -> int:
        for _ in range(rank):
            agreement.begin()
            agreement.fail()
        deadline = time.monotonic() + DEADLINE_SECONDS
        step = 0
        while time.monotonic() < deadline:
            step += 1
            told.set()
            agreement.begin()
            time.sleep(0.005)
            if agreement.end():
                return step
        raise AssertionError

    assert len(set(on_agreements(2, train))) == 1


def test_an_error_of_the_chief_is_raised_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    local = threading.local()
    monkeypatch.setattr(checkpoint, "these_workers", lambda: local.workers)

    def write() -> None:
        raise OSError("the disk is full")

    def save(workers: ConnectedWorkers) -> str:
        local.workers = workers
        try:
            checkpoint.save_together(lambda _: write, "save one.pt")
        except (OSError, CommunicationError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    assert on_workers(2, save) == [
        "OSError: the disk is full",
        "CommunicationError: The chief could not save one.pt. OSError: the disk is full",
    ]
