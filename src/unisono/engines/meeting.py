"""Where the replicas of a run meet, and how they are freed when one of them cannot come."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from unisono.devices import Trail, lend
from unisono.engines.generators import RunGenerators
from unisono.engines.guard import Guard, ReplicaStopped
from unisono.engines.turns import Turns
from unisono.errors import ContextError, UnequalCallsError, UnsupportedError
from unisono.tracing import span
from unisono.values import tensors_of

_NOTHING = object()


class Recorder(Protocol):
    """Records a run, to do again what it did.

    Attributes:
        generators: The random generators of the run; None for new ones.
        streams: The stream of each replica; empty if all use those of the caller.
        is_apart: Whether no meeting is a part of a recording.
        is_joint: Whether what passes between workers is a part of it.
        is_capturing: Whether GPUs do nothing before the recording ends.
        call_each: In a replay, makes one call on the thread of each replica; None if there is no
            replay, or on GPUs.
        is_on_host: Whether replicas are on CPUs.
    """

    generators: RunGenerators | None
    streams: Sequence[torch.cuda.Stream]
    is_apart: bool
    is_joint: bool
    is_capturing: bool
    is_on_host: bool
    call_each: Callable[[Sequence[Callable[[], None]]], None] | None

    def on_replica(self, replica_id: int) -> AbstractContextManager[None]:
        """Within the block, the current thread runs a replica."""

    def call(self, what: str, work: Callable[[], Any], settings: Any = None) -> Any:
        """Makes a call that Python must make every time, unless its `settings` stay the same."""

    def refuse(self, reason: str) -> None:
        """Hears of something that cannot be done again."""


class _Arrival(NamedTuple):
    what: str
    given: Any
    work: Callable[[list[Any]], Sequence[Any]]
    in_python: bool
    settings: Any


class ReplicaMeeting:
    """The meeting point of the replicas of one run.

    Replicas wait in `meet` until all have come. Replica 0 then does the work, so it does not
    depend on who came last. When a replica fails, or returns while others wait for it, the first
    real error is kept and everybody else is stopped: who waits or comes here, and who computes.
    Work on `gpus` is in the order of the meetings, whatever streams the replicas use. Errors call
    the replicas by their `names`. A `recorder` records what Python does in meetings. That is all
    that is done in them if they reach other memories, other workers, or a hook in their place
    (`has_workers`).

    Attributes:
        is_apart: Whether Python does all that is done in meetings again at every replay.
        orders_streams: Whether replicas wait for the streams of each other. Streams that are
            captured separately must not.
    """

    def __init__(
        self,
        num_replicas: int,
        turns: Turns,
        gpus: Sequence[torch.device] = (),
        guards: Sequence[Guard] | None = None,
        names: Sequence[str] | None = None,
        recorder: Recorder | None = None,
        *,
        has_workers: bool = False,
    ) -> None:
        self.recorder = recorder
        self.is_apart = recorder is not None and (
            recorder.is_apart or (has_workers and not recorder.is_joint)
        )
        if recorder is not None and recorder.is_capturing and recorder.streams:
            gpus = ()
        self.orders_streams = bool(gpus)
        self._num_replicas = num_replicas
        self._turns = turns
        self._gpus = gpus
        # The streams on which replicas had started what they gave, and replica 0 its work.
        self._given, self._done = Trail(), Trail()
        self._guards = guards or [Guard() for _ in range(num_replicas)]
        self._names = names or [f"replica {i}" for i in range(num_replicas)]
        self._lock = threading.Lock()
        self._arrivals: dict[int, _Arrival] = {}
        self._shares: dict[int, Any] = {}
        self._calls: dict[int, Callable[[], None]] = {}
        self._answers: dict[int, Any] = {}
        self._returned: set[int] = set()
        self.failure: BaseException | None = None
        # Which replica is where only one may be, and how often it has entered.
        self._alone: int | None = None
        self._num_entered = 0
        self._alone_lock = threading.Lock()
        self._process = os.getpid()

    def attend(self, replica_id: int, body: Callable[[], Any]) -> Any:
        """Runs a replica from its beginning to its end; user code in it is to be `exposed`."""
        try:
            self._turns.begin(replica_id)
            if self.failure is not None:
                raise ReplicaStopped
            result = body()
            self._leave(replica_id)
        except BaseException as error:
            # Before the turn passes on: nobody is to begin after a failure.
            self._guards[replica_id].cover_surely()
            self.fail(error)
            raise
        self._turns.leave(replica_id)
        return result

    def meet(
        self,
        replica_id: int,
        what: str,
        given: Any,
        work: Callable[[list[Any]], Sequence[Any]],
        *,
        in_python: bool = False,
        settings: Any = None,
    ) -> Any:
        """Waits for all replicas, lets replica 0's `work` see what all gave, returns its share.

        Work that is done `in_python` is more than what it starts on GPUs. A run that is replayed
        does it again, unless it depends only on `settings`, which have not changed.
        """
        # Without a call of Python.
        arrival = tuple.__new__(_Arrival, (what, given, work, in_python, settings))
        if self._num_replicas == 1:
            with span("merge", what):
                return self._do_work([arrival])[0]
        if self._process != os.getpid():
            raise ContextError(
                f"{what} was called in a process that was forked in the middle of a step, where "
                "the other replicas do not exist. Fork outside `run`."
            )
        if self._alone == replica_id:
            raise UnsupportedError(
                f"{what} was called inside forward-mode differentiation (`torch.func.jvp`, "
                "`forward_ad.dual_level`), which torch has once for all threads, so replicas take "
                "turns there and cannot wait for each other. Call it outside."
            )
        guard = self._guards[replica_id]
        guard.cover()
        if self._gpus:
            self._note(self._given)
        num_told = self._turns.num_told()
        with self._lock:
            arrivals = self._arrivals
            # Those who wait have made the same call as the last one of them.
            last = next(reversed(arrivals.values()), arrival)
            arrivals[replica_id] = arrival
            if self.failure is not None or self._returned or last.what != what:
                self._check_calls()
            is_last = len(arrivals) == self._num_replicas
        if replica_id == 0:
            share = self._lead(what)
        else:
            share = self._follow(replica_id, what, num_told if is_last else None)
        guard.expose()
        return share

    def enter_alone(self, replica_id: int) -> None:
        """Waits until no other replica is where only one may be."""
        if self._alone != replica_id:
            while not self._alone_lock.acquire(timeout=0.05):
                if self.failure is not None:
                    raise ReplicaStopped
                if self._alone in self._returned:
                    raise ContextError(
                        f"{self._names[self._alone]} has returned inside forward-mode "
                        "differentiation. Call `forward_ad.exit_dual_level()` in the step."
                    )
            self._alone = replica_id
        self._num_entered += 1

    def leave_alone(self, replica_id: int) -> None:
        """Lets another replica enter, if this one has left as often as it has entered."""
        if self._alone == replica_id:
            self._num_entered -= 1
            if self._num_entered == 0:
                self._alone = None
                self._alone_lock.release()

    def call_waiting(self, calls: Sequence[Callable[[ReplicaMeeting], Any]]) -> list[Any]:
        """From within `work`: every replica makes its call, with a new meeting point."""
        inner = ReplicaMeeting(
            self._num_replicas, self._turns, self._gpus, self._guards, self._names
        )
        if self._num_replicas == 1:
            return [calls[0](inner)]
        self._note(self._done)
        with self._lock:
            self._calls = {i: self._answered(call, i, inner) for i, call in enumerate(calls)}
            own = self._calls.pop(0)
        self._turns.tell_others()
        own()
        with span("wait", "answers", replica=0) as waiting:
            self._wait_for_all(lambda: len(self._answers))
            waiting.note(last=next(reversed(self._answers)))
        self._given.follow()
        with self._lock:
            answers, self._answers = self._answers, {}
        return [answers[i] for i in range(self._num_replicas)]

    def fail(self, error: BaseException) -> None:
        """Stops everybody; only the first error counts."""
        with self._lock:
            if self.failure is None and not isinstance(error, ReplicaStopped):
                self.failure = error
        self._turns.free()
        for guard in self._guards:
            guard.stop()

    def take_failure(self) -> BaseException | None:
        """After the end of all replicas: returns the first error, and forgets it."""
        failure, self.failure = self.failure, None
        return failure

    def forget(self) -> None:
        """After the end of all replicas: forgets what they brought to a meeting that has failed.

        It may lead to autograd's graph, and from there to here again, which no collector sees.
        """
        for table in (self._arrivals, self._shares, self._calls, self._answers, self._returned):
            table.clear()

    def stop_again(self) -> None:
        """Stops replicas that are still in user code although the step has failed."""
        if self.failure is not None:
            for guard in self._guards:
                guard.stop(is_again=True)

    def exposed(self, replica_id: int, body: Callable[[], Any]) -> Any:
        """Runs user code, which may be stopped at any instruction."""
        guard = self._guards[replica_id]
        guard.expose()
        try:
            result = body()
            guard.cover()
        except BaseException:
            guard.cover_surely()
            raise
        return result

    def _lead(self, what: str) -> Any:
        with span("wait", what, replica=0) as waiting:
            self._wait_for_all(lambda: len(self._arrivals))
            waiting.note(last=next(reversed(self._arrivals)))
        arrivals = [self._arrivals[i] for i in range(self._num_replicas)]
        self._given.follow()
        with span("merge", what):
            shares = list(self._do_work(arrivals))
        if self._gpus:
            self._note(self._done)
        with self._lock:
            self._arrivals.clear()
            self._shares = dict(enumerate(shares))
            own = self._shares.pop(0)
        self._turns.tell_others()
        return own

    def _do_work(self, arrivals: Sequence[_Arrival]) -> Sequence[Any]:
        first, given = arrivals[0], [arrival.given for arrival in arrivals]
        if self.recorder is None or not (first.in_python or self.is_apart):
            return first.work(given)
        shares: Sequence[Any] = self.recorder.call(
            first.what, lambda: first.work(given), first.settings
        )
        return shares

    def _follow(self, replica_id: int, what: str, num_told: int | None) -> Any:
        """Waits for the first replica, which the one who comes last tells that all are here."""

        def is_over() -> bool:
            is_told = replica_id in self._shares or replica_id in self._calls
            return is_told or self.failure is not None

        while True:
            with span("wait", what, replica=replica_id):
                if num_told is not None:
                    self._turns.tell_first_and_wait(num_told)
                    num_told = None
                self._turns.wait_for(replica_id, is_over)
            with self._lock:
                share = self._shares.pop(replica_id, _NOTHING)
                call = None if share is not _NOTHING else self._calls.pop(replica_id, None)
            if share is _NOTHING and call is None:
                raise ReplicaStopped
            comes_from_elsewhere = self._done.follow()
            if call is None:
                if comes_from_elsewhere:
                    lend(tensors_of(share))
                return share
            call()

    def _leave(self, replica_id: int) -> None:
        with self._lock:
            self._returned.add(replica_id)
            if self._arrivals or self.failure is not None:
                self._check_calls()

    def _note(self, trail: Trail) -> None:
        for gpu in self._gpus:
            trail.note(gpu)

    def _answered(
        self, call: Callable[[ReplicaMeeting], Any], replica_id: int, inner: ReplicaMeeting
    ) -> Callable[[], None]:
        def make() -> None:
            try:
                answer = self.exposed(replica_id, lambda: call(inner))
                inner._leave(replica_id)
            except BaseException as error:
                inner.fail(error)
                self.fail(inner.failure or error)
                raise
            self._note(self._given)
            with self._lock:
                self._answers[replica_id] = answer
            self._turns.tell_first()

        return make

    def _wait_for_all(self, num_present: Callable[[], int]) -> None:
        """The first replica waits until something of all replicas is there."""
        num_replicas = self._num_replicas

        def is_over() -> bool:
            return num_present() == num_replicas or self.failure is not None

        self._turns.wait_for(0, is_over)
        if num_present() < num_replicas:
            raise ReplicaStopped

    def _check_calls(self) -> None:
        """Ends the step where replicas can no longer meet: calls differ, or one has returned."""
        names = {arrival.what for arrival in self._arrivals.values()}
        if self.failure is None and (len(names) > 1 or (names and self._returned)):
            called, arrivals = self._names, sorted(self._arrivals.items())
            waiting = [f"{called[i]} is in {arrival.what}" for i, arrival in arrivals]
            returned = [f"{called[i]} has returned" for i in sorted(self._returned)]
            self.failure = UnequalCallsError(
                "Every replica must make the same calls in the same order, but "
                f"{', '.join(waiting + returned)}. Remove the branch of the step that depends on "
                "the replica."
            )
        if self.failure is not None:
            raise ReplicaStopped
