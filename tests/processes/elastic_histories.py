"""Histories of elastic jobs that are drawn at random: who is killed and paused, when and where."""

from __future__ import annotations

import faulthandler
import heapq
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

import unisono as uo
from processes.crew import Crew, Desk, Member
from processes.elastic_programs import POINTS, Program, Training
from processes.injections import left_over
from processes.leftovers import Holdings
from processes.namespaces import Hosts, enter
from processes.ports import free_ports
from unisono.experimental import CommunicationImplementation, CommunicationOptions

_NOTHING = Holdings(descriptors=64, threads=64, segments=0, ports=0)
# Worker 0 serves the store of a job's first meeting until its next job.
_NOTHING_BUT_THE_STORE = _NOTHING._replace(ports=1)
_SECONDS = 120.0
_IMPLEMENTATIONS = (
    CommunicationImplementation.AUTO,
    CommunicationImplementation.TCP,
    CommunicationImplementation.RING,
)


class Event(NamedTuple):
    """What happens to a worker.

    Attributes:
        kind: "kill" or "pause".
        worker: Which one.
        run: In which of its runs.
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
    places: tuple[int, ...] = field(default=())

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
        return History(
            seed,
            num_workers,
            program,
            rng.choice(_IMPLEMENTATIONS),
            tuple(events),
            tuple(worker * num_hosts // num_workers for worker in range(num_workers)),
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
    """Lets happen to this process what is to happen to it."""

    def __init__(self, desk: Desk, events: Sequence[Event]) -> None:
        self._desk = desk
        self._waiting = list(events)
        self._run = -1
        self._lock = threading.Lock()

    def begin(self, run: int) -> None:
        self._run = run
        for event in self._waiting:
            if event.run == run and not event.point:
                self._desk.tell(event)

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
    desk: Desk, history: History, addresses: list[str], worker: int, namespace: str | None
) -> tuple[dict[str, Any], str | None]:
    """What a worker finds at the end, and what it still holds then."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if namespace is not None:
        enter(namespace)
    torch.manual_seed(worker)
    fate = _Fate(desk, [event for event in history.events if event.worker == worker])
    options = CommunicationOptions(1 << 10, 40.0, history.implementation)
    strategy = _strategy(addresses, worker, history.program, options, elastic=True)
    try:
        found = Training(strategy, history.program, fate).train(fate.begin)
    finally:
        strategy.close()
    del strategy
    return found, left_over(_NOTHING if worker else _NOTHING_BUT_THE_STORE)


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
    """Plays one history with the members of a crew."""

    def __init__(self, crew: Crew, history: History, hosts: Hosts | None) -> None:
        self._crew = crew
        self._history = history
        self._members: dict[int, Member] = dict(enumerate(crew.members[: history.num_workers]))
        self._results: dict[int, Any] = {}
        self._failures: list[str] = []
        self._killed: set[int] = set()
        self._later: list[tuple[float, int, Event]] = []
        if hosts is None:
            addresses = [f"127.0.0.1:{port}" for port in free_ports(history.num_workers)]
        else:
            addresses = [
                f"{hosts.address(place)}:{port}" for port, place in enumerate(history.places, 4000)
            ]
        for worker, member in self._members.items():
            namespace = None if hosts is None else hosts.names[history.places[worker]]
            member.begin(work, history, addresses, worker, namespace)

    def results(self) -> dict[int, Any]:
        """Returns what the survivors found.

        Raises:
            AssertionError: With what went wrong.
        """
        waiting = dict(self._members)
        deadline = time.monotonic() + _SECONDS
        while waiting and time.monotonic() < deadline:
            until = min([deadline] + [at for at, *_ in self._later[:1]])
            pipes = [member.pipe for member in waiting.values()]
            ready = wait(pipes, max(0.0, until - time.monotonic()))
            for worker in [one for one, member in waiting.items() if member.pipe in ready]:
                if self._hear(worker):
                    del waiting[worker]
            while self._later and self._later[0][0] <= time.monotonic():
                self._let_happen(heapq.heappop(self._later)[2])
        for worker, member in waiting.items():
            self._failures.append(f"Worker {worker} has not ended.")
            member.send(signal.SIGCONT)
            member.send(signal.SIGUSR1)
        if waiting:
            time.sleep(2.0)
        for worker in [*waiting, *self._killed]:
            self._crew.replace(worker)
        assert not self._failures, "\n".join([repr(self._history), *self._failures])
        return self._results

    def _hear(self, worker: int) -> bool:
        """Returns whether this was the last that a worker says."""
        try:
            is_well, value = self._members[worker].pipe.recv()
        except (EOFError, ConnectionError):
            self._killed.add(worker)
            if not any(one.worker == worker and one.kind == "kill" for one in self._history.events):
                self._failures.append(f"Worker {worker} has died.")
            return True
        if isinstance(value, Event):
            heapq.heappush(self._later, (time.monotonic() + value.seconds, len(self._later), value))
            return False
        if is_well:
            self._results[worker] = value
        else:
            self._failures.append(f"Worker {worker} raised:\n{value}")
        return True

    def _let_happen(self, event: Event) -> None:
        member = self._members[event.worker]
        if event.kind == "kill":
            # One that has ended already is killed all the same.
            member.send(signal.SIGKILL)
            self._killed.add(event.worker)
            return
        stat = Path(f"/proc/{member.process_id}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.01)
        member.send(signal.SIGCONT)


def play(crew: Crew, history: History, hosts: Hosts | None = None) -> None:
    """Plays a history, and compares what the survivors find with an undisturbed job.

    Raises:
        AssertionError: If something differs or is left behind.
    """
    results = Play(crew, history, hosts).results()
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
