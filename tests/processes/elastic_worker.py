"""What a worker does in a history of an elastic job."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import unisono as uo
from processes.crew import Desk
from processes.elastic_history import COMING, JOINS, Event, History
from processes.elastic_programs import Program, Training
from processes.injections import left_over
from processes.leftovers import Holdings
from processes.namespaces import enter
from unisono.cluster.elastic.finding import LAUNCHER
from unisono.communicators.wire import share_state as share_with_those_who_join
from unisono.errors import CommunicationError, JobMismatchError, UnsupportedError
from unisono.experimental import CommunicationOptions
from unisono.workers.elastic import job as elastic_job

# What a worker tells: it is in the job, or it was given up and asks to be let in again.
IN, AGAIN = "in", "again"
# Why a worker has not come to the end: it was preempted.
LEFT = "it has left"
_NOTHING = Holdings(descriptors=64, threads=64, segments=0, ports=0)
# Worker 0 serves the store of a job's first meeting until its next job.
_NOTHING_BUT_THE_STORE = _NOTHING._replace(ports=1)
# What libraries keep that a job is the first to use, beyond what the first job did, and what it
# takes to serve others. A worker that joins another job first does that later.
_SOME = Holdings(descriptors=20, threads=6, segments=0, ports=0)
_BYTES_PER_PACK = 1 << 10
# How long workers wait for one that is to come.
_USUAL_PATIENCE, _HARSH_PATIENCE = 30.0, 3.0


class Outcome(NamedTuple):
    """What came of a worker.

    Attributes:
        found: What it found at the end; None if it was given up, or nobody may go on.
        why: The error, if it has not come to the end.
        left: What it still holds, in words.
        trail: The workers with which it began each run, by run.
    """

    found: dict[str, Any] | None
    why: str
    left: str | None
    trail: dict[int, tuple[int, ...]]


class Place(NamedTuple):
    """The network of a worker, and the address of the launcher there."""

    namespace: str
    launcher: str


class _Fate:
    """Lets happen to this process what is to happen to it, and waits for others that come."""

    def __init__(self, desk: Desk, history: History, worker: int, *, is_new: bool) -> None:
        self._desk = desk
        self._key_of = history.key
        own = [one for one in history.events if one.worker == worker and one.kind not in COMING]
        self._coming = [one for one in history.events if one.kind in COMING]
        # Nothing happens again to one that comes back.
        joins = any(one.kind == "join" and one.worker == worker for one in self._coming)
        self._waiting = own if joins or not is_new else []
        self._patience = _HARSH_PATIENCE if history.is_harsh else _USUAL_PATIENCE
        self._run = -1
        self._lock = threading.Lock()
        self.trail: dict[int, tuple[int, ...]] = {}
        self.strategy: uo.MultiWorkerMirroredStrategy | None = None

    def begin(self, run: int) -> None:
        self._run = run
        job = self._job()
        self.trail[run] = job.members.met.members
        for event in self._coming:
            if event.run == run:
                self._wait_for(event)
        for event in self._waiting:
            if event.run == run and not event.point:
                self._desk.tell(event)

    def _job(self) -> elastic_job.ElasticJob:
        assert self.strategy is not None
        job = self.strategy.extended.elastic
        assert job is not None
        return job

    def _wait_for(self, event: Event) -> None:
        """Waits until a worker has knocked at one of all doors."""
        self._desk.tell(event)
        key, deadline = self._key_of(event.worker), time.monotonic() + self._patience
        while time.monotonic() < deadline and not self._desk.store.check([key]):
            if self._job().members.newcomers():
                self._desk.store.set(key, "")
            time.sleep(0.02)

    def __call__(self, point: str) -> None:
        for event in self._waiting:
            if (event.run, event.point) != (self._run, point):
                continue
            with self._lock:
                if event not in self._waiting:
                    return
                self._waiting.remove(event)
            if event.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if event.kind == "leave":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(event.lasting)
                return
            self._desk.tell(event)
            os.kill(os.getpid(), signal.SIGSTOP)
            return


def undisturbed(desk: Desk, program: Program) -> dict[str, Any]:
    """What a job finds that has one worker, and loses nobody."""
    # PowerSGD draws random numbers for each pack.
    options = CommunicationOptions(_BYTES_PER_PACK)
    strategy = _strategy(["127.0.0.1:1"], 0, program, options, elastic=False)
    try:
        return Training(strategy, program, lambda _: None).train(lambda _: None)
    finally:
        strategy.close()


def work(
    desk: Desk,
    history: History,
    addresses: list[str],
    worker: int,
    place: Place | None,
    is_new: bool,
) -> Outcome:
    """What a worker does, and what it still holds at the end."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if place is not None:
        enter(place.namespace)
        os.environ[LAUNCHER] = place.launcher
    fate = _Fate(desk, history, worker, is_new=is_new)
    found, why = _end_of(desk, history, addresses, worker, fate, is_new=is_new)
    if "without this one" in why:
        desk.tell(AGAIN)
        fate = _Fate(desk, history, worker, is_new=True)
        found, why = _end_of(desk, history, addresses, worker, fate, is_new=True)
    allowed = _NOTHING if worker else _NOTHING_BUT_THE_STORE
    return Outcome(found, why, left_over(allowed, _SOME), fate.trail)


def _end_of(
    desk: Desk, history: History, addresses: list[str], worker: int, fate: _Fate, *, is_new: bool
) -> tuple[dict[str, Any] | None, str]:
    """Returns what a worker finds, or why it has not come to the end."""
    torch.manual_seed(worker)
    options = CommunicationOptions(_BYTES_PER_PACK, history.timeout_seconds, history.implementation)
    folder = str(history.folder) if history.has_preemptions else None
    try:
        strategy = _strategy(addresses, worker, history.program, options, elastic=True)
        if is_new:
            desk.tell(IN)
        fate.strategy = strategy
        try:
            with _told_when_others_join(fate):
                training = Training(strategy, history.program, fate, folder)
                with closing(training):
                    return training.train(fate.begin), ""
        finally:
            fate.strategy = None
            strategy.close()
    except SystemExit as left:
        return None, LEFT if left.code == 0 else f"it has left with {left.code}"
    except CommunicationError as error:
        if not history.is_harsh or isinstance(error, JobMismatchError):
            raise
        return None, f"{type(error).__name__}: {error}"
    except UnsupportedError as error:
        if not history.may_lose_states or "Several workers were lost at once" not in str(error):
            raise
        return None, str(error)


@contextmanager
def _told_when_others_join(fate: _Fate) -> Iterator[None]:
    original = share_with_those_who_join

    def share_state(*args: Any) -> Any:
        fate(JOINS)
        return original(*args)

    with patch.object(elastic_job, "share_state", share_state):
        yield


def _strategy(
    addresses: list[str], worker: int, program: Program, options: Any, *, elastic: bool
) -> uo.MultiWorkerMirroredStrategy:
    return uo.MultiWorkerMirroredStrategy(
        uo.cluster_resolver.SimpleClusterResolver(
            {"worker": addresses}, task_type="worker", task_id=worker
        ),
        options,
        devices=["cpu:0"],
        num_replicas=program.num_replicas,
        synchronize_batch_norm=program.is_batch_norm_synchronized,
        elastic=elastic,
    )
