"""Runs a function on every replica of one worker."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd import set_multithreading_enabled

from unisono.contexts import ReplicaContext, Replicas, entered, running_replica
from unisono.devices import Device, this_machine
from unisono.engines import (
    Ambient,
    Compilations,
    GlobalRandomness,
    Interpreter,
    OneByOne,
    Recorder,
    ReplicaGenerators,
    ReplicaMeeting,
    ReplicaThreads,
    RunGenerators,
    Turns,
    drawing,
    modes_need_turns,
    tell_compiler,
    without_shared_caches,
)
from unisono.errors import add_note
from unisono.reductions import Workers
from unisono.tracing import span
from unisono.values import select_replica


class Step(NamedTuple):
    """What all replicas call, each with its own part of the arguments."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def of(self, replica_id: int) -> Callable[[], Any]:
        """Returns the call of a replica."""
        own, own_kwargs = select_replica(replica_id, self.args), self.kwargs
        if own_kwargs:
            own_kwargs = select_replica(replica_id, own_kwargs)
        return functools.partial(self.fn, *own, **own_kwargs)


class Capturable:
    """A step that can be captured, and replayed without Python: `unisono.function` makes one.

    Attributes:
        fn: The step itself.
    """

    fn: Callable[..., Any]

    def captures(self, replicas: Any, runner: Runner) -> Any:
        """Returns what runs all such steps of a strategy."""
        raise NotImplementedError


class Runner:
    """One thread per replica, or the caller's own where there is one replica."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        workers: Workers,
        num_intraop: int | None,
        *,
        is_serial: bool,
    ) -> None:
        self._devices = devices
        self._num_intraop = num_intraop
        where = f" of worker {workers.rank}" if workers.are_many else ""
        numbers = workers.layout(len(devices)).own
        self._names = [f"replica {number}{where}" for number in numbers]
        self._for_all = ReplicaGenerators(-1)
        self.generators = [ReplicaGenerators(number, self._for_all) for number in numbers]
        self.places = [this_machine().torch_device(device) for device in devices]
        self._gpus = list(dict.fromkeys(place for place in self.places if place.type == "cuda"))
        self._is_serial = is_serial
        self._all_at_once = Turns(len(devices))
        self.threads = ReplicaThreads(len(devices), num_intraop)
        self._lock = threading.Lock()
        self._global_randomness = GlobalRandomness()
        self._interpreter = Interpreter(len(devices), is_serial=is_serial)
        self._compilations = Compilations()
        # That of the last run, if it has not failed and is not special. It is used again.
        self._meeting: ReplicaMeeting | None = None
        self._num_replaying: int | None = None
        # The random numbers of the last run.
        self.of_run: RunGenerators | None = None

    def run(
        self,
        replicas: Replicas,
        step: Step,
        weights: Sequence[float],
        recorder: Recorder | None = None,
    ) -> Sequence[Any]:
        """Makes a step on each replica; returns what each returned."""
        may_compile = self._compilations.may_come(step.fn, (*step.args, *step.kwargs.values()))
        # A compiled function must not be compiled again for what watches a postponed update.
        replicas.mirrors.postponed.is_on &= not may_compile
        has_modes = recorder is not None and recorder.is_on_host
        is_serial = may_compile or self._is_serial or modes_need_turns(more=has_modes)
        meeting, self._meeting = self._meeting, None
        if meeting is None or is_serial or recorder is not None:
            meeting = self._new_meeting(replicas, recorder, is_serial=is_serial)
        is_single = replicas.mirrors.is_single
        contexts = [
            ReplicaContext(replicas, i, meeting, weight, generators=None if is_single else own)
            for i, (weight, own) in enumerate(zip(weights, self.generators, strict=True))
        ]
        try:
            results = self._run_on(contexts, meeting, step)
            self._compilations.note()
        finally:
            # They refer back to the contexts. Only the garbage collector would free the step.
            meeting.forget()
            for context in contexts:
                context.notes.current_pass = None
        if not is_serial and recorder is None:
            self._meeting = meeting
        return results

    def _new_meeting(
        self, replicas: Replicas, recorder: Recorder | None, *, is_serial: bool
    ) -> ReplicaMeeting:
        num_replicas = len(self._devices)
        return ReplicaMeeting(
            num_replicas,
            OneByOne(num_replicas) if is_serial else self._all_at_once,
            self._gpus,
            names=self._names,
            recorder=recorder,
            has_workers=replicas.gradients.has_workers,
        )

    def run_single(self, replicas: Replicas, step: Step) -> Any:
        """Makes a step for a replica that shares nothing, and returns what it returns."""
        tell_compiler()
        if self._meeting is None:
            self._meeting = self._new_meeting(replicas, None, is_serial=False)
        return self._call_single(ReplicaContext(replicas, 0, self._meeting), step)

    def _call_single(self, context: ReplicaContext, step: Step) -> Any:
        with (
            span("replica", "replica", replica=0),
            entered(context),
            _on_device(self.places[0]),
            _recorded(context.meeting, 0),
        ):
            return step.of(0)()

    def _run_on(
        self, contexts: list[ReplicaContext], meeting: ReplicaMeeting, step: Step
    ) -> Sequence[Any]:
        places = self.places
        if contexts[0].replicas.mirrors.is_single:
            return (self._call_single(contexts[0], step),)
        of_run = None if meeting.recorder is None else meeting.recorder.generators
        if of_run is None:
            of_run = self.of_run = RunGenerators()
            for own in (*self.generators, self._for_all):
                own.begin(of_run)
        if len(contexts) == 1:
            return (self._run_alone(contexts[0], step),)
        # Replica 0 has this thread, so it has all this already but for the variables' copy.
        ambient = Ambient.of_this_thread(places)
        streams = () if meeting.recorder is None else meeting.recorder.streams

        def call(context: ReplicaContext) -> Callable[[], Any]:
            replica_id = context.local_id

            def body() -> Any:
                own = step.of(replica_id)
                with (
                    entered(context),
                    without_shared_caches(),
                    drawing(),
                    _recorded(meeting, replica_id),
                ):
                    return meeting.exposed(replica_id, own)

            def on_device() -> Any:
                stream = streams[replica_id] if streams else None
                with self._named(replica_id):
                    return ambient.call(body, places[replica_id], stream)

            def traced() -> Any:
                with span("replica", "replica", replica=replica_id):
                    return meeting.attend(replica_id, on_device)

            return traced

        # Streams that are captured separately must not wait for each other.
        ordered = _in_order(streams) if streams and meeting.orders_streams else nullcontext()
        with self._lock, ordered:
            before = self._global_randomness.before()
            calls = [call(context) for context in contexts]
            results = self._interpreter.run(calls, lambda own: self.threads.run(own, meeting))
            self._global_randomness.after(before)
        of_run.settle()
        return results

    def _run_alone(self, context: ReplicaContext, step: Step) -> Any:
        """Makes a step for the only replica of this worker, which has all that its caller has."""
        with (
            self._named(0),
            span("replica", "replica", replica=0),
            entered(context),
            _on_device(self.places[0]),
            # Backward hooks must find the replica, so they run on its thread.
            set_multithreading_enabled(False),
            _intraop_threads(self._num_intraop),
            without_shared_caches(),
            drawing(),
            context.replicas.mirrors.postponed,
            _recorded(context.meeting, 0),
        ):
            return step.of(0)()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """In the block, torch has the number of threads that a replica has."""
        self._num_replaying = self.threads.num_intraop()
        with self._lock, _intraop_threads(self._num_replaying):
            yield

    def call_each(self, calls: Sequence[Callable[[], None]]) -> None:
        """In a replay: makes calls on the threads of the replicas, which meet nowhere."""
        meeting = ReplicaMeeting(len(self._devices), self._all_at_once, names=self._names)

        def attending(replica_id: int, call: Callable[[], None]) -> None:
            with self._named(replica_id):
                meeting.attend(replica_id, call)

        each = [functools.partial(attending, i, call) for i, call in enumerate(calls)]
        self.threads.run(each, meeting, self._num_replaying)

    def run_again(self, running: ReplicaContext, step: Step) -> list[Any]:
        """From within a `merge_call`: makes a step on each of the replicas that wait there."""

        def call(replica_id: int, meeting: ReplicaMeeting) -> Any:
            own = step.of(replica_id)
            waiting = running_replica()
            assert waiting is not None
            with entered(dataclasses.replace(waiting, meeting=meeting)):
                return own()

        if running.meeting.recorder is not None:
            running.meeting.recorder.refuse("replicas run again inside a `merge_call`")
        calls = [functools.partial(call, i) for i in range(len(self._devices))]
        return running.meeting.call_waiting(calls)

    def _named(self, replica_id: int) -> _Named:
        return _Named(f"Raised on {self._names[replica_id]} ({self._devices[replica_id]}).")


class _Named:
    """Says in the errors of a block where they were raised; a class, as `entered` is."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            add_note(error, self._words)


def _recorded(meeting: ReplicaMeeting, replica_id: int) -> AbstractContextManager[None]:
    """In the block, what the replica does is recorded, if something records the run."""
    recorder = meeting.recorder
    return nullcontext() if recorder is None else recorder.on_replica(replica_id)


def _on_device(place: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


@contextmanager
def _intraop_threads(num_threads: int | None) -> Iterator[None]:
    """In the block, torch uses `num_threads` inside an operator. None changes nothing."""
    before = torch.get_num_threads()
    during = before if num_threads is None else num_threads
    try:
        if during != before:
            torch.set_num_threads(during)
        yield
    finally:
        if during != before:
            torch.set_num_threads(before)


@contextmanager
def _in_order(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Orders the work of these streams between what this thread has started and what it will."""
    current = {one: torch.cuda.current_stream(one.device) for one in streams}
    others = [(one, own) for one, own in current.items() if one != own]
    for one, own in others:
        one.wait_stream(own)
    yield
    for one, own in others:
        own.wait_stream(one)
