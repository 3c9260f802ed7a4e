"""One persistent thread a replica."""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from unisono.engines.meeting import ReplicaMeeting, ReplicaStopped

Call: TypeAlias = Callable[[], Any]


class _Answer(NamedTuple):
    run: int
    replica_id: int
    succeeded: bool
    outcome: Any


@dataclass
class _Desk:
    """What one thread has to do. It holds at every instruction, as a stop may come at any."""

    replica_id: int
    answers: queue.SimpleQueue[_Answer]
    bell: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    call: Call | None = None
    run: int = 0
    started: int = 0
    answered: int = 0
    is_closed: bool = False

    def work(self, num_intraop_threads: int) -> None:
        """Answers every call until the desk is closed."""
        # torch applies the number of a thread only once it has been read there.
        torch.set_num_threads(num_intraop_threads)
        torch.get_num_threads()
        self.answers.put(_Answer(0, self.replica_id, succeeded=True, outcome=None))
        while not self.is_closed:
            try:
                if self.answered == self.run:
                    self.bell.get()
                else:
                    self._answer()
            except ReplicaStopped:
                # The stop came too late for the call, or between the call and its answer.
                continue

    def _answer(self) -> None:
        if self.started == self.run:
            self.answers.put(
                _Answer(self.run, self.replica_id, succeeded=False, outcome=ReplicaStopped())
            )
        else:
            self.started = self.run
            assert self.call is not None
            self.answers.put(_Answer(self.run, self.replica_id, *_outcome(self.call)))
        self.call = None
        self.answered = self.run


def _outcome(call: Call) -> tuple[bool, Any]:
    try:
        return True, call()
    except BaseException as error:
        return False, error


class ReplicaThreads:
    """Makes one call a replica, all at the same time, again and again on the same threads.

    The threads start with the first run and end with the object, or with `close`.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._run = 0
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._desks: list[_Desk] = []
        self._threads: list[threading.Thread] = []
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def run(self, calls: Sequence[Call], meeting: ReplicaMeeting) -> list[Any]:
        """Returns what the calls return, or raises the first real error of any of them."""
        self._start()
        self._run += 1
        for desk, call in zip(self._desks, calls, strict=True):
            desk.call = call
            desk.run = self._run
            desk.bell.put(None)
        results: dict[int, Any] = {}
        running = set(range(self._num_replicas))
        try:
            self._collect(running, results, meeting)
        except BaseException as interrupt:
            # Ctrl-C: the replicas end at their next instruction, or where they next meet.
            meeting.fail(interrupt)
            self._stop(running)
            self._collect_or_abandon(running, results, meeting)
        if meeting.failure is not None:
            raise meeting.failure
        return [results[i] for i in range(self._num_replicas)]

    def close(self) -> None:
        """Ends the threads."""
        if self._finalizer is not None:
            self._finalizer()
            for thread in self._threads:
                thread.join()
            self._finalizer = None

    def _collect(self, running: set[int], results: dict[int, Any], meeting: ReplicaMeeting) -> None:
        while running:
            answer = self._answers.get()
            if answer.run != self._run or answer.replica_id not in running:
                continue
            running.remove(answer.replica_id)
            if answer.succeeded:
                results[answer.replica_id] = answer.outcome
            else:
                meeting.fail(answer.outcome)
                self._stop(running)

    def _collect_or_abandon(
        self, running: set[int], results: dict[int, Any], meeting: ReplicaMeeting
    ) -> None:
        try:
            self._collect(running, results, meeting)
        except BaseException:
            # Ctrl-C again: leave the threads to end by themselves; the next run starts others.
            if self._finalizer is not None:
                self._finalizer()
                self._finalizer = None
            self._answers = queue.SimpleQueue()
            raise

    def _stop(self, running: set[int]) -> None:
        for replica_id in running:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._threads[replica_id].ident or 0),
                ctypes.py_object(ReplicaStopped),
            )

    def _start(self) -> None:
        if self._finalizer is not None:
            return
        num_threads = torch.get_num_threads()
        num_intraop = max(1, num_threads // self._num_replicas)
        self._desks = [_Desk(i, self._answers, run=0) for i in range(self._num_replicas)]
        self._threads = [
            threading.Thread(
                target=desk.work,
                args=(num_intraop,),
                name=f"unisono-replica-{desk.replica_id}",
                daemon=True,
            )
            for desk in self._desks
        ]
        self._finalizer = weakref.finalize(self, _close, self._desks)
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._answers.get()
        # What a replica's thread set would otherwise be the number for every new thread.
        torch.set_num_threads(num_threads)


def _close(desks: Sequence[_Desk]) -> None:
    for desk in desks:
        desk.is_closed = True
        desk.bell.put(None)
