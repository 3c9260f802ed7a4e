"""Histories of elastic jobs that are drawn at random: who is killed, paused or joins, and when."""

from __future__ import annotations

import faulthandler
import heapq
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import unisono as uo
from processes.crew import Crew, Desk
from processes.elastic_programs import POINTS, Program, Training
from processes.injections import left_over
from processes.leftovers import Holdings
from processes.namespaces import Hosts, enter
from processes.ports import free_ports
from unisono.cluster.elastic import share_state as share_with_those_who_join
from unisono.experimental import CommunicationImplementation, CommunicationOptions
from unisono.strategies import elastic_job

_NOTHING = Holdings(descriptors=64, threads=64, segments=0, ports=0)
# Worker 0 serves the store of a job's first meeting until its next job.
_NOTHING_BUT_THE_STORE = _NOTHING._replace(ports=1)
# What libraries keep that a job is the first to use, beyond what the first job did.
_SOME = Holdings(descriptors=12, threads=6, segments=0, ports=0)
_SECONDS = 120.0
MOST_WORKERS = 6
_COMING = ("return", "join")
_IN = "in"
_JOINS = "when another gets the state"
_IMPLEMENTATIONS = (
    CommunicationImplementation.AUTO,
    CommunicationImplementation.TCP,
    CommunicationImplementation.RING,
)


class Event(NamedTuple):
    """What happens to a worker.

    Attributes:
        kind: "kill", "pause", "return" of one that was killed, or "join" of a new one.
        worker: Which one.
        run: In which of its runs; the others wait there for one that comes.
        point: Where in the run; "" for some time after its begin.
        seconds: How long after the begin, or how long it is paused.
    """

    kind: str
    worker: int
    run: int
    point: str
    seconds: float


@dataclass(frozen=True)
class History:
    """What a job goes through."""

    seed: int
    num_workers: int
    program: Program
    implementation: CommunicationImplementation
    events: tuple[Event, ...]
    places: tuple[int, ...]
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @staticmethod
    def drawn(seed: int, num_hosts: int = 1) -> History:
        """Draws one."""
        rng = random.Random(seed)
        num_workers = rng.randint(2, 6)
        num_replicas = rng.randint(num_workers, min(4 * num_workers, 10))
        program = Program.drawn(rng, num_replicas)
        num_killed = rng.randint(1, num_workers - 1)
        killed = rng.sample(range(num_workers), num_killed)
        events = [_killed(rng, worker, program.num_runs) for worker in killed]
        if num_killed > 1 and rng.random() < 0.3:
            # Two at about the same time: the second one while the others meet.
            events[1] = Event("kill", killed[1], events[0].run, "", rng.random() * 0.5)
        for worker in rng.sample(range(num_workers), rng.choice((0, 0, 1, 1, 2))):
            events.append(_paused(rng, worker, program.num_runs))
        for event in events[:num_killed]:
            later = range(event.run + 1, program.num_runs)
            if later and rng.random() < 0.4:
                events.append(Event("return", event.worker, rng.choice(later), "", 0.0))
        if num_workers < min(num_replicas, MOST_WORKERS) and rng.random() < 0.4:
            events.append(Event("join", num_workers, rng.randrange(1, program.num_runs), "", 0.0))
        runs = [event.run for event in events if event.kind in _COMING]
        left = sorted(set(range(num_workers)) - set(killed))
        if runs and len(left) > 1 and rng.random() < 0.5:
            events.append(Event("kill", rng.choice(left), rng.choice(runs), _JOINS, 0.0))
        return History(
            seed,
            num_workers,
            program,
            rng.choice(_IMPLEMENTATIONS),
            tuple(events),
            # The last place is that of the one that joins.
            (*(one * num_hosts // num_workers for one in range(num_workers)), num_hosts - 1),
        )


def _killed(rng: random.Random, worker: int, num_runs: int) -> Event:
    run = rng.randrange(num_runs)
    if rng.random() < 0.5:
        return Event("kill", worker, run, rng.choice(POINTS), 0.0)
    return Event("kill", worker, run, "", rng.random() * rng.choice((0.005, 0.05, 0.3)))


def _paused(rng: random.Random, worker: int, num_runs: int) -> Event:
    seconds = rng.choice((0.1, 0.5, 1.5)) * rng.random()
    return Event("pause", worker, rng.randrange(num_runs), rng.choice(POINTS), seconds)


class _Fate:
    """Lets happen to this process what is to happen to it, and waits for others that come."""

    def __init__(self, desk: Desk, history: History, worker: int, *, is_new: bool) -> None:
        self._desk = desk
        self._name = f"{history.seed} {history.name}"
        own = [one for one in history.events if one.worker == worker and one.kind not in _COMING]
        self._waiting = [] if is_new else own
        self._coming = [one for one in history.events if one.kind in _COMING]
        self._run = -1
        self._lock = threading.Lock()
        self.strategy: uo.MultiWorkerMirroredStrategy | None = None

    def begin(self, run: int) -> None:
        self._run = run
        for event in self._coming:
            if event.run == run:
                self._wait_for(event)
        for event in self._waiting:
            if event.run == run and not event.point:
                self._desk.tell(event)

    def _wait_for(self, event: Event) -> None:
        """Waits until a worker has knocked at one of all doors."""
        assert self.strategy is not None
        job = self.strategy.extended.elastic
        assert job is not None
        self._desk.tell(event)
        key, deadline = f"{self._name} {event.worker} has knocked", time.monotonic() + 30
        while time.monotonic() < deadline and not self._desk.store.check([key]):
            if job.members.newcomers():
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
            self._desk.tell(event)
            os.kill(os.getpid(), signal.SIGSTOP)
            return


def undisturbed(desk: Desk, program: Program) -> dict[str, Any]:
    """What a job finds that has one worker, and loses nobody."""
    strategy = _strategy(["127.0.0.1:1"], 0, program, CommunicationOptions(), elastic=False)
    try:
        return Training(strategy, program, lambda _: None).train(lambda _: None)
    finally:
        strategy.close()


def work(
    desk: Desk,
    history: History,
    addresses: list[str],
    worker: int,
    namespace: str | None,
    is_new: bool,
) -> tuple[dict[str, Any], str | None]:
    """What a worker finds at the end, and what it still holds then."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if namespace is not None:
        enter(namespace)
    torch.manual_seed(worker)
    fate = _Fate(desk, history, worker, is_new=is_new)
    options = CommunicationOptions(1 << 10, 40.0, history.implementation)
    strategy = _strategy(addresses, worker, history.program, options, elastic=True)
    if is_new:
        desk.tell(_IN)
    fate.strategy = strategy
    try:
        with _told_when_others_join(fate):
            found = Training(strategy, history.program, fate).train(fate.begin)
    finally:
        strategy.close()
    fate.strategy = None
    del strategy
    return found, left_over(_NOTHING if worker else _NOTHING_BUT_THE_STORE, _SOME)


@contextmanager
def _told_when_others_join(fate: _Fate) -> Iterator[None]:
    original = share_with_those_who_join

    def share_state(*args: Any) -> Any:
        fate(_JOINS)
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


class Play:
    """Plays one history with the members of a crew.

    Attributes:
        late: Workers that came when the others had ended.
    """

    def __init__(self, crew: Crew, history: History, hosts: Hosts | None) -> None:
        self._crew, self._history, self._hosts = crew, history, hosts
        # One more, which joins.
        count = history.num_workers + 1
        if hosts is None:
            self._addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        else:
            self._addresses = [
                f"{hosts.address(place)}:{port}" for port, place in enumerate(history.places, 4000)
            ]
        self._waiting: set[int] = set()
        self._results: dict[int, Any] = {}
        self._failures: list[str] = []
        self._killed: set[int] = set()
        self._come: set[Event] = set()
        self._outside: set[int] = set()
        self._later: list[tuple[float, int, Event]] = []
        self.late: set[int] = set()
        for worker in range(history.num_workers):
            self._start(worker, is_new=False)

    def _start(self, worker: int, *, is_new: bool) -> None:
        history = self._history
        if worker in self._killed:
            self._crew.replace(worker)
            self._killed.remove(worker)
        place = history.places[worker]
        namespace = None if self._hosts is None else self._hosts.names[place]
        # The first ones know of no others.
        known = max(worker + 1, history.num_workers)
        given = (history, self._addresses[:known], worker, namespace, is_new)
        self._crew.members[worker].begin(work, *given)
        self._waiting.add(worker)
        if is_new:
            self._outside.add(worker)

    def results(self) -> dict[int, Any]:
        """Returns what the survivors found.

        Raises:
            AssertionError: With what went wrong.
        """
        deadline = time.monotonic() + _SECONDS
        while self._waiting and time.monotonic() < deadline:
            if self._waiting == self._outside and not self._later:
                self._give_up_outside()
            self._listen(min([deadline] + [at for at, *_ in self._later[:1]]))
            while self._later and self._later[0][0] <= time.monotonic():
                self._let_happen(heapq.heappop(self._later)[2])
        for worker in self._waiting:
            self._failures.append(f"Worker {worker} has not ended.")
            self._crew.members[worker].send(signal.SIGCONT)
            self._crew.members[worker].send(signal.SIGUSR1)
        if self._waiting:
            time.sleep(2.0)
        for worker in {*self._waiting, *self._killed}:
            self._crew.replace(worker)
        assert not self._failures, "\n".join([repr(self._history), *self._failures])
        return self._results

    def _listen(self, until: float) -> None:
        pipes = {worker: self._crew.members[worker].pipe for worker in self._waiting}
        ready = wait(list(pipes.values()), max(0.0, until - time.monotonic()))
        for worker in [worker for worker, pipe in pipes.items() if pipe in ready]:
            self._hear(worker)

    def _give_up_outside(self) -> None:
        """The others have ended, so one that is not in yet will not be."""
        self._listen(time.monotonic() + 2.0)
        for worker in self._outside & self._waiting:
            self._crew.members[worker].send(signal.SIGKILL)
            self.late.add(worker)

    def _hear(self, worker: int) -> None:
        try:
            is_well, value = self._crew.members[worker].pipe.recv()
        except (EOFError, ConnectionError):
            self._waiting.discard(worker)
            self._outside.discard(worker)
            self._killed.add(worker)
            own = [one for one in self._history.events if one.worker == worker]
            if worker not in self.late and not any(one.kind == "kill" for one in own):
                self._failures.append(f"Worker {worker} has died.")
            return
        if isinstance(value, Event):
            self._plan(value)
        elif value == _IN:
            self._outside.discard(worker)
        else:
            self._waiting.discard(worker)
            self._outside.discard(worker)
            if is_well:
                self._results[worker] = value
            else:
                self._failures.append(f"Worker {worker} raised:\n{value}")

    def _plan(self, event: Event) -> None:
        if event.kind not in _COMING:
            at = time.monotonic() + event.seconds
            heapq.heappush(self._later, (at, len(self._later), event))
        elif event not in self._come:
            self._come.add(event)
            self._let_come(event)

    def _let_come(self, event: Event) -> None:
        if event.kind == "return" and event.worker in self._waiting:
            # It has been killed, or is about to be, and nobody has heard of that yet.
            self._later.append((time.monotonic() + 0.05, len(self._later), event))
            heapq.heapify(self._later)
            return
        self._start(event.worker, is_new=True)

    def _let_happen(self, event: Event) -> None:
        if event.kind in _COMING:
            self._let_come(event)
            return
        member = self._crew.members[event.worker]
        if event.kind == "kill":
            # One that has ended already is killed all the same.
            member.send(signal.SIGKILL)
            if event.worker not in self._waiting:
                self._killed.add(event.worker)
            return
        stat = Path(f"/proc/{member.process_id}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.01)
        member.send(signal.SIGCONT)


def play(crew: Crew, history: History, hosts: Hosts | None = None) -> int:
    """Plays a history, and compares what the survivors find with an undisturbed job.

    Returns:
        How many workers came too late to join.

    Raises:
        AssertionError: If something differs or is left behind.
    """
    it = Play(crew, history, hosts)
    results = it.results()
    spare = crew.members[-1]
    spare.begin(undisturbed, history.program)
    expected = spare.hear(_SECONDS)
    assert expected["samples"] == history.program.samples(), f"{history}: other samples"
    assert results, f"{history}: nobody is left"
    for worker, (found, left) in results.items():
        differing = [name for name in expected if found.get(name) != expected[name]]
        assert found.keys() == expected.keys(), f"{history}: other results"
        assert not differing, f"{history}: worker {worker} differs in {differing}"
        assert left is None, f"{history}: worker {worker} has left {left}"
    return len(it.late)
