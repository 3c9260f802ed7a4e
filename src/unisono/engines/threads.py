"""One persistent thread a replica."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from unisono.engines.meeting import ReplicaMeeting

Call: TypeAlias = Callable[[], Any]
Outcomes: TypeAlias = dict[int, Any]
_Inbox: TypeAlias = "queue.SimpleQueue[tuple[Call, Outcomes] | None]"

# How often a replica that has not ended is told again to stop.
_STOP_AGAIN_S = 0.1


class ReplicaThreads:
    """Makes one call a replica, all at the same time, again and again on the same threads.

    The threads start with the first run and end with the object, or with `close`.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inboxes: list[_Inbox] = []
        self._threads: list[threading.Thread] = []
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def run(self, calls: Sequence[Call], meeting: ReplicaMeeting) -> list[Any]:
        """Returns what the calls return, or raises the first real error of any of them."""
        self._start()
        outcomes: Outcomes = {}
        num_given = 0
        try:
            for inbox, call in zip(self._inboxes, calls, strict=True):
                inbox.put((call, outcomes))
                num_given += 1
            self._collect(outcomes, num_given, meeting)
        except BaseException as interrupt:
            # Ctrl-C: the replicas end at their next instruction, or where they wait.
            meeting.fail(interrupt)
            self._collect_or_abandon(outcomes, num_given, meeting)
        if meeting.failure is not None:
            raise meeting.failure
        return [outcomes[i] for i in range(self._num_replicas)]

    def close(self) -> None:
        """Ends the threads."""
        if self._finalizer is not None:
            self._finalizer()
            for thread in self._threads:
                thread.join()
            self._finalizer = None

    def _collect(self, outcomes: Outcomes, num_given: int, meeting: ReplicaMeeting) -> None:
        # The bell only saves time: an interrupt may swallow it, but not an outcome.
        while len(outcomes) < num_given:
            try:
                self._bell.get(timeout=_STOP_AGAIN_S)
            except queue.Empty:
                meeting.stop_again()

    def _collect_or_abandon(
        self, outcomes: Outcomes, num_given: int, meeting: ReplicaMeeting
    ) -> None:
        try:
            self._collect(outcomes, num_given, meeting)
        except BaseException:
            # Ctrl-C again: leave the threads to end by themselves; the next run starts others.
            if self._finalizer is not None:
                self._finalizer()
                self._finalizer = None
            raise

    def _start(self) -> None:
        if self._finalizer is not None:
            return
        num_threads = torch.get_num_threads()
        num_intraop = max(1, num_threads // self._num_replicas)
        self._inboxes = [queue.SimpleQueue() for _ in range(self._num_replicas)]
        self._threads = [
            threading.Thread(
                target=_work,
                args=(replica_id, inbox, self._bell, num_intraop),
                name=f"unisono-replica-{replica_id}",
                daemon=True,
            )
            for replica_id, inbox in enumerate(self._inboxes)
        ]
        self._finalizer = weakref.finalize(self, _end, self._inboxes)
        for thread in self._threads:
            thread.start()
        ready: Outcomes = {}
        for inbox in self._inboxes:
            inbox.put((torch.get_num_threads, ready))
        while len(ready) < self._num_replicas:
            self._bell.get()
        # What a replica's thread set would otherwise be the number for every new thread.
        torch.set_num_threads(num_threads)


def _end(inboxes: Sequence[_Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _work(
    replica_id: int, inbox: _Inbox, bell: queue.SimpleQueue[None], num_intraop_threads: int
) -> None:
    # torch applies the number of a thread only once it has been read there.
    torch.set_num_threads(num_intraop_threads)
    torch.get_num_threads()
    while (given := inbox.get()) is not None:
        call, outcomes = given
        outcomes[replica_id] = _outcome(call)
        bell.put(None)
        # A thread that waits for work must not keep what the last call used.
        del given, call, outcomes


def _outcome(call: Call) -> Any:
    try:
        return call()
    except BaseException as error:
        # The meeting has it too, and decides which error is the one that counts.
        return error
