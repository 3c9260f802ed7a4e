"""A step as graphs, and between them the calls that Python makes at every replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from unisono.engines import RunGenerators
from unisono.errors import CaptureError
from unisono.functions.gradients import Gradients, StartingGradients, trained_by
from unisono.modules import Mirrors, Settings
from unisono.values import map_tensors, tensors_of

CallEach: TypeAlias = Callable[[Sequence[Callable[[], None]]], None]


class Part(Protocol):
    """What replicas do between two calls of Python."""

    def replay(self) -> None:
        """Does it again."""

    def free(self) -> None:
        """Gives back its memory."""


class Graphs(Protocol):
    """Captures what the replicas of one run do, part by part.

    Attributes:
        streams: The stream of each replica, where each memory has its own.
        is_apart: Whether nothing that passes between replicas can be captured.
        is_on_host: Whether replicas are on CPUs, where all that is captured happens meanwhile. On
            GPUs, `finish` makes it happen.
        is_joint: Whether what passes between workers is captured, too.
        call_each: Makes one call on the thread of each replica, on CPUs.
    """

    streams: Sequence[torch.cuda.Stream]
    is_apart: bool
    is_on_host: bool
    is_joint: bool
    call_each: Any

    @property
    def has_drawn(self) -> bool:
        """Whether a replica has drawn random numbers."""

    @property
    def reason(self) -> str:
        """Why the run cannot be captured; empty as long as it can."""

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, nothing disturbs the captures."""

    def on_replica(self, replica_id: int) -> contextlib.AbstractContextManager[None]:
        """Within the block, the current thread runs a replica."""

    def begin(self) -> None:
        """Begins a part."""

    def finish(self, held: Sequence[Tensor] | None = None) -> Part | None:
        """Ends a part. Python reads the tensors that are `held`, or any that there are."""

    def refuse(self, reason: str) -> None:
        """Notes why the run cannot be captured. What happens goes on."""

    def attempt(self, work: Callable[[], Any]) -> tuple[Any, Part | None]:
        """On CPUs: does some work as a part; returns its result and the part, if there is one."""

    def abort(self) -> None:
        """Ends a part that has failed."""

    def kept(self, tensor: Tensor) -> Tensor:
        """Returns where a result of the run is after every replay."""


@dataclass(eq=False)
class _Call:
    """A call that Python makes between two graphs; `gradients` returns those of the moment."""

    what: str
    work: Callable[[], Any]
    gradients: Callable[[], Gradients]

    def first(self) -> Any:
        """Makes the call while the step is captured; later ones write where its results are."""
        self.before = self.gradients()
        result = self.work()
        self._kept = tensors_of(result)
        self._after = self.gradients()
        return result

    def free(self) -> None:
        """Holds no memory."""

    def replay(self) -> None:
        """Makes the call again."""
        self.before.restore()
        found = tensors_of(self.work())
        self._after.take(self.what)
        if len(found) != len(self._kept):
            raise CaptureError(
                f"{self.what} returned {len(found)} tensors in a replay, but {len(self._kept)} "
                "when the step was captured. Return the same structure in every step."
            )
        for kept, new in zip(self._kept, found, strict=True):
            if kept is not new:
                kept.copy_(new)


class Recording:
    """Records one run, which really happens.

    Args:
        waiting: The updates of optimizers that do not become a part of the graphs, even if their
            settings allow it; None for all.
    """

    is_capturing = True

    def __init__(
        self,
        mirrors: Mirrors,
        generators: RunGenerators | None,
        graphs: Graphs,
        waiting: Collection[str] | None,
    ) -> None:
        self._mirrors = mirrors
        self.generators = generators
        self._graphs = graphs
        self.streams = graphs.streams
        self.is_apart = graphs.is_apart
        self.is_on_host = graphs.is_on_host
        self.is_joint = graphs.is_joint
        # Only in replays: before, replicas wait for the call that Python makes.
        self.call_each: CallEach | None = None
        self.on_replica = graphs.on_replica
        # An update reaches other memories by copies between them, which no graph of a GPU holds.
        are_several = graphs.is_apart if not graphs.is_on_host else mirrors.is_spread
        self._waiting = None if are_several else waiting
        self._parts: list[Part] = []
        self._calls: list[_Call] = []
        self._trained = trained_by(mirrors)
        self._start = StartingGradients(mirrors, self._trained)
        self._end: Gradients | None = None
        self.settings: list[Settings] = []
        self.is_random = self.has_drawn = True
        self.is_untouched = False

    @property
    def num_calls(self) -> int:
        """How many calls Python makes at every replay."""
        return len(self._calls)

    @property
    def begins_pure(self) -> bool:
        """Whether nothing can be seen of a replay that fails in its first part."""
        return bool(self._parts) and getattr(self._parts[0], "is_pure", False)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block the run is recorded; it is discarded if the block fails."""
        with self._graphs.in_use():
            self._graphs.begin()
            try:
                yield
            except BaseException:
                self._graphs.abort()
                if not self._graphs.is_on_host:
                    self._start.restore()
                raise
            self._finish([one.grad for one in self._trained if one.grad is not None])
        self.call_each = self._graphs.call_each
        self._start.find_used([one.before for one in self._calls])
        self._end = Gradients(self._mirrors, self._trained)
        self.has_drawn = self._graphs.has_drawn
        self.is_random = self.has_drawn or self.num_calls > 0

    def refuse(self, reason: str) -> None:
        """Ends the capture of a step that does what its rehearsals did not."""
        if self._graphs.is_on_host:
            self._graphs.refuse(reason)
            return
        raise CaptureError(
            f"The step did not do this in its first calls: {reason}. Make the step do the same "
            "in every call."
        )

    def call(self, what: str, work: Callable[[], Any], settings: Settings | None = None) -> Any:
        """Ends the graph so far, makes a call in Python, and begins the next graph."""
        takes_in = self._waiting is not None and what not in self._waiting
        constant = settings if settings and takes_in and settings.can_be_captured else None
        if constant is not None and not self.is_on_host:
            self.settings.append(constant)
            return work()
        self._finish()
        call = _Call(what, work, lambda: Gradients(self._mirrors, self._trained))
        # Already now: if the call fails, a part of the step has happened.
        self._calls.append(call)
        part: Part | None = None
        if constant is None:
            result = call.first()
        else:
            result, part = self._graphs.attempt(call.first)
            if part is not None:
                self._calls.remove(call)
                self.settings.append(constant)
        self._parts.append(part or call)
        self._graphs.begin()
        return result

    def kept(self, outputs: Any) -> Any:
        """At the end of the run: returns where its results are after every replay."""
        return map_tensors(self._graphs.kept, outputs)

    def replay(self) -> None:
        """Does what the recorded run did."""
        self._start.fill()
        if not self._calls:
            self._replay_parts()
        else:
            self._mirrors.watch.stamp()
            self._mirrors.fronts.up_during(self._replay_parts)
        if self._end is not None:
            self._end.restore()

    def free(self) -> None:
        """Gives back the memory of all parts; there are no more replays."""
        for part in self._parts:
            part.free()
        self._parts.clear()

    def _replay_parts(self) -> None:
        # Whether nothing can be seen of a replay that fails now.
        self.is_untouched = self.begins_pure
        for part in self._parts:
            part.replay()
            self.is_untouched = False

    def _finish(self, held: Sequence[Tensor] | None = None) -> None:
        part = self._graphs.finish(held)
        if part is not None:
            self._parts.append(part)
