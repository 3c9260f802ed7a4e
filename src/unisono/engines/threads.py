"""One persistent thread a replica; the caller's own is that of replica 0."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from unisono.engines.ambient import ThreadState
from unisono.engines.meeting import ReplicaMeeting
from unisono.engines.process_wide import keep_replicas_apart
from unisono.engines.turns import make_bell
from unisono.sharing import LiveSet, computed_once
from unisono.system import use_all_cores
from unisono.tracing import span

Call: TypeAlias = Callable[[], Any]
Outcomes: TypeAlias = dict[int, Any]

# How often a replica that has not ended is asked again to stop; also how long Ctrl-C may take.
_STOP_AGAIN_S = 0.1
_LOOK_AGAIN_S = 60.0
# How long the end of the program waits for a thread.
_LAST_WAIT_S = 1.0
_NOTHING: Any = object()
# The smallest number. It equals zero on a thread that flushes denormal numbers.
_SMALLEST = 5e-324


class _Board:
    """Where threads find their next call. It does not know whose it is, so that may end.

    A call belongs to the thread that takes it out of `given`, which is one operation: the replica's
    own thread, or the caller's where the step has failed.
    """

    def __init__(self, num_replicas: int) -> None:
        self.given: dict[int, tuple[Call, Outcomes] | None] = {}
        self.has_new = make_bell(num_replicas)
        self.has_ended = make_bell(num_replicas)

    def take(self, replica_id: int, *, has_ended: bool = False) -> tuple[Call, Outcomes] | None:
        """Waits for the next call of a replica; None is the last."""
        has_new: Any = self.has_new
        while True:
            seen = has_new.count
            given: tuple[Call, Outcomes] | None = self.given.pop(replica_id, _NOTHING)
            if given is not _NOTHING:
                if has_ended:
                    self.has_ended.ring()
                return given
            if has_ended:
                has_ended = False
                self.has_ended.ring_and_wait(has_new, seen, _LOOK_AGAIN_S)
            else:
                has_new.wait(seen, _LOOK_AGAIN_S)

    def end(self, num_replicas: int) -> None:
        """Lets every thread end."""
        self.given.update(dict.fromkeys(range(1, num_replicas)))
        self.has_new.ring()


class ReplicaThreads:
    """Makes one call per replica, all at the same time, repeatedly on the same threads."""

    def __init__(self, num_replicas: int, num_intraop: int | None = None) -> None:
        keep_replicas_apart()
        self._num_replicas = num_replicas
        self._num_intraop = num_intraop
        self._board = _Board(num_replicas)
        self._threads: list[threading.Thread] = []
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._process = os.getpid()

    def num_intraop(self) -> int:
        """Returns how many threads torch uses inside an operator of a replica."""
        return self._num_intraop or max(1, torch.get_num_threads() // self._num_replicas)

    def run(
        self, calls: Sequence[Call], meeting: ReplicaMeeting, num_intraop: int | None = None
    ) -> list[Any]:
        """Returns what the calls return, or raises the first real error of any of them."""
        num_threads = torch.get_num_threads()
        num_intraop = num_intraop or self.num_intraop()
        self._start(num_intraop)
        outcomes: Outcomes = {}
        flushes = _SMALLEST == 0.0
        others: dict[int, tuple[Call, Outcomes]] = {
            i: (functools.partial(_call_like_caller, flushes, calls[i]), outcomes)
            for i in range(1, self._num_replicas)
        }
        try:
            self._board.given.update(others)
            self._board.has_new.ring()
            torch.set_num_threads(num_intraop)
            outcomes[0] = calls[0]()
            with span("wait", "return", replica=0) as waiting:
                self._collect(outcomes, meeting)
                waiting.note(last=next(reversed(outcomes)))
        except BaseException as error:
            # Of replica 0, or Ctrl-C: the others end at their next instruction, or where they wait.
            meeting.fail(error)
            self._collect_or_abandon(outcomes, meeting)
        finally:
            # What a thread sets is also the number for every new thread.
            torch.set_num_threads(num_threads)
        failure = meeting.take_failure()
        if failure is not None:
            # An error leads to this frame. Nothing here may lead back to it, or what the step used
            # would wait for the garbage collector.
            outcomes.clear()
            try:
                raise failure
            finally:
                del failure
        return [outcomes[i] for i in range(self._num_replicas)]

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the threads."""
        if self._process != os.getpid():
            self.abandon()
        if self._finalizer is not None:
            self._finalizer()
            for thread in self._threads:
                thread.join(timeout_s)
            self._finalizer = None

    def abandon(self) -> None:
        """In a forked child, which has none of the threads: leaves what they waited for alone."""
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None

    def _collect(self, outcomes: Outcomes, meeting: ReplicaMeeting) -> None:
        bell = self._board.has_ended
        while True:
            # The bell only saves time: an interrupt may swallow it, but not an outcome.
            seen = bell.count
            if len(outcomes) == self._num_replicas:
                return
            if not bell.wait(seen, _STOP_AGAIN_S):
                meeting.stop_again()

    def _collect_or_abandon(self, outcomes: Outcomes, meeting: ReplicaMeeting) -> None:
        try:
            outcomes[0] = None
            for replica_id in range(1, self._num_replicas):
                if self._board.given.pop(replica_id, None) is not None:
                    outcomes[replica_id] = None
            self._collect(outcomes, meeting)
        except BaseException:
            # Ctrl-C again: leave the threads to end by themselves; the next run starts others.
            if self._finalizer is not None:
                self._finalizer()
                self._finalizer = None
            raise

    def _start(self, num_intraop: int) -> None:
        if self._finalizer is not None:
            return
        # The first call in a forked child makes a new autograd engine. Two threads that do so at
        # the same time crash in torch.
        torch.autograd._is_checkpoint_valid()
        board = _Board(self._num_replicas)
        threads = [
            threading.Thread(
                target=_work,
                args=(replica_id, board, num_intraop),
                name=f"unisono-replica-{replica_id}",
                daemon=True,
            )
            for replica_id in range(1, self._num_replicas)
        ]
        try:
            for thread in threads:
                thread.start()
            self._board, self._threads = board, threads
            _end_with_the_program()
            _alive.add(self)
            self._finalizer = weakref.finalize(self, board.end, self._num_replicas)
            self._finalizer.atexit = False
        except BaseException:
            # Ctrl-C: the threads that have started end, and the next run starts others.
            self._finalizer = None
            board.end(self._num_replicas)
            raise


def _call_like_caller(flushes: bool, call: Call) -> Any:  # noqa: FBT001
    """Makes a call on a thread that flushes denormal numbers if the caller of the run does."""
    if (_SMALLEST == 0.0) is not flushes:
        torch.set_flush_denormal(flushes)
    return call()


_alive: LiveSet[ReplicaThreads] = LiveSet()


@computed_once
def _end_with_the_program() -> None:
    """Python ends threads that wait in native code at its end, which C++ takes for a fault."""

    def end() -> None:
        for threads in _alive:
            threads.close(_LAST_WAIT_S)

    atexit.register(end)


def _work(replica_id: int, board: _Board, num_intraop: int) -> None:
    use_all_cores()
    # torch applies the number of a thread only once it has been read there.
    torch.set_num_threads(num_intraop)
    torch.get_num_threads()
    state = ThreadState()
    has_ended = False
    while (given := board.take(replica_id, has_ended=has_ended)) is not None:
        call, outcomes = given
        outcomes[replica_id] = _outcome(call, state)
        has_ended = True
        # A thread that waits for work must not keep what the last call used.
        del given, call, outcomes


def _outcome(call: Call, state: ThreadState) -> Any:
    try:
        return call()
    except BaseException as error:
        state.restore()
        # The meeting has it too, and decides which error is the one that counts.
        return error
