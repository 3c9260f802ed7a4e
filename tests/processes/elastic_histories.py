"""Plays histories of elastic jobs, and compares what comes of them with undisturbed jobs."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

from processes.crew import Crew
from processes.elastic_history import COMING, Event, History
from processes.elastic_worker import AGAIN, IN, LEFT, Outcome, Place, undisturbed, work
from processes.namespaces import Hosts, board_on
from processes.ports import free_ports

_SECONDS = 120.0
_PATIENCE_SECONDS = 2.0
# Nobody else listens on these hosts. A job may end later than the next one begins.
_ports = itertools.cycle(range(4000, 9000))


class Play:
    """Plays one history with the members of a crew.

    Attributes:
        late: Workers that came when the others had ended.
    """

    def __init__(self, crew: Crew, history: History, hosts: Hosts | None) -> None:
        self._crew, self._history, self._hosts = crew, history, hosts
        if hosts is None:
            ports = free_ports(len(history.places))
            self._addresses = [f"127.0.0.1:{port}" for port in ports]
        else:
            self._addresses = [f"{hosts.address(place)}:{next(_ports)}" for place in history.places]
            # Each uses the port after the one that it is given.
            ports = [(next(_ports), next(_ports))[0] for _ in hosts.names]
            self._boards = [board_on(hosts, *pair) for pair in enumerate(ports)]
        self._waiting: set[int] = set()
        self._results: dict[int, Outcome] = {}
        self._failures: list[str] = []
        self._killed: set[int] = set()
        self._come: dict[Event, float] = {}
        self._paused: dict[Event, int] = {}
        self._outside: set[int] = set()
        self._later: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self.late: set[int] = set()
        for worker in range(history.num_workers):
            self._start(worker, is_new=False)

    def _start(self, worker: int, *, is_new: bool) -> None:
        history = self._history
        if worker in self._killed:
            self._crew.replace(worker, waits=False)
            self._killed.remove(worker)
        place = history.places[worker]
        host = None
        if self._hosts is not None:
            host = Place(self._hosts.names[place], self._boards[place].address)
        # The first ones know of no others.
        known = max(worker + 1, history.num_workers)
        given = (history, self._addresses[:known], worker, host, is_new)
        self._crew.members[worker].begin(work, *given)
        self._waiting.add(worker)
        if is_new:
            self._outside.add(worker)

    def results(self) -> dict[int, Outcome]:
        """Returns what came of the survivors.

        Raises:
            AssertionError: With what went wrong.
        """
        deadline = time.monotonic() + _SECONDS
        while self._waiting and time.monotonic() < deadline:
            if self._waiting == self._outside and not self._is_somebody_to_come():
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
            self._crew.replace(worker, waits=False)
        assert not self._failures, "\n".join([repr(self._history), *self._failures])
        return self._results

    def _is_somebody_to_come(self) -> bool:
        return any(event.kind != "reconnect" for *_, event in self._later)

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
        elif value == IN:
            self._outside.discard(worker)
        elif value == AGAIN:
            self._outside.add(worker)
        else:
            self._waiting.discard(worker)
            self._outside.discard(worker)
            if is_well:
                self._results[worker] = value
            else:
                self._failures.append(f"Worker {worker} raised:\n{value}")

    def _plan(self, event: Event) -> None:
        if event.kind == "pause":
            self._paused[event] = self._crew.members[event.worker].process_id
            self._do_later(event.lasting, event)
        elif event.kind not in COMING:
            self._do_later(event.seconds, event)
        elif event not in self._come:
            self._come[event] = time.monotonic()
            self._let_come(event)

    def _do_later(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), event))

    def _let_come(self, event: Event) -> None:
        if event.kind == "return" and event.worker in self._waiting:
            # It has been killed or has left, or is about to, and nobody has heard of that yet.
            if time.monotonic() < self._come[event] + _PATIENCE_SECONDS:
                self._do_later(0.05, event)
            else:
                # It was preempted, and waits with the others: it does not leave in time.
                self._crew.store.set(self._history.key(event.worker), "")
            return
        self._start(event.worker, is_new=True)

    def _let_happen(self, event: Event) -> None:
        member = self._crew.members[event.worker]
        if event.kind in COMING:
            self._let_come(event)
        elif event.kind == "kill":
            # One that has ended already is killed all the same.
            member.send(signal.SIGKILL)
            if event.worker not in self._waiting:
                self._killed.add(event.worker)
        elif event.kind == "pause":
            # It may have been killed meanwhile.
            with suppress(FileNotFoundError, ProcessLookupError):
                stat = Path(f"/proc/{self._paused[event]}/stat")
                while stat.read_text().rpartition(")")[2].split()[0] not in "TZ":
                    time.sleep(0.01)
                os.kill(self._paused[event], signal.SIGCONT)
        else:
            self._change_link(event)

    def _change_link(self, event: Event) -> None:
        assert self._hosts is not None
        host = self._history.places[event.worker]
        {"cut": self._hosts.cut, "mute": self._hosts.mute, "reconnect": self._hosts.reconnect}[
            event.kind
        ](host)
        if event.kind != "reconnect" and event.lasting < math.inf:
            self._do_later(event.lasting, replace(event, kind="reconnect"))


def play(
    crew: Crew, history: History, hosts: Hosts | None = None
) -> tuple[str, dict[int, Outcome]]:
    """Plays a history, and compares what the survivors find with an undisturbed job.

    Returns:
        What came of it, in words, and what came of each worker.

    Raises:
        AssertionError: If something differs or is left behind.
    """
    spare = crew.members[-1]
    spare.begin(undisturbed, history.program)
    it = Play(crew, history, hosts)
    try:
        results = it.results()
    finally:
        if hosts is not None:
            for host in range(len(hosts.names)):
                hosts.reconnect(host)
        expected = spare.hear(_SECONDS)
        saved = list(history.folder.glob("*"))
        shutil.rmtree(history.folder, ignore_errors=True)
    assert expected["samples"] == history.program.samples(), f"{history}: other samples"
    done = {worker: one.found for worker, one in results.items() if one.found is not None}
    assert done or history.is_harsh or history.may_lose_states, f"{history}: nobody is left"
    assert not saved or history.is_harsh, f"{history}: there are checkpoints: {saved}"
    odd = [one.why for one in results.values() if one.why.startswith("it has left with")]
    assert not odd, f"{history}: {odd}"
    preempted = {one.worker for one in history.events if one.kind == "leave"}
    others = {worker for worker, one in results.items() if one.why == LEFT} - preempted
    assert not others or saved, f"{history}: {others} have left, and were not preempted"
    for worker, found in done.items():
        differing = [name for name in expected if found.get(name) != expected[name]]
        assert found.keys() == expected.keys(), f"{history}: other results"
        assert not differing, f"{history}: worker {worker} differs in {differing}"
    _check_that_one_side_went_on(history, list(results.values()))
    for worker, one in results.items():
        assert one.left is None, f"{history}: worker {worker} has left {one.left}"
    return f"{len(done)} are done, {len(it.late)} came too late, {_ends(results)}", results


def _check_that_one_side_went_on(history: History, outcomes: list[Outcome]) -> None:
    """No run was made by two groups of workers that have nobody in common."""
    for one, other in itertools.combinations(outcomes, 2):
        for run in one.trail.keys() & other.trail.keys():
            both = one.trail[run], other.trail[run]
            assert set(both[0]) & set(both[1]), f"{history}: {both} have both made run {run}"


def _ends(results: dict[int, Outcome]) -> str:
    ends = [f"{worker} has ended ({one.why})" for worker, one in results.items() if one.why]
    return "; ".join(ends) or "none was given up"
