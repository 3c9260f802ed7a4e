"""A step as graphs, and between them the calls that Python makes at every replay."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from unisono.engines import RunGenerators
from unisono.errors import CaptureError
from unisono.functions.gradients import Gradients, StartingGradients, trained_by
from unisono.functions.watching import Line
from unisono.modules import Mirrors, Settings
from unisono.torch_private import copy_each
from unisono.values import map_tensors, tensors_of

# Kernels may give other bits for memory that begins elsewhere in such a line.
_LINE = 64
# For each part and each replica, the operators that it called, and where in the program.
Logs: TypeAlias = list[list[list[tuple[str, Line]]]]
CallEach: TypeAlias = Callable[[Sequence[Callable[[], None]]], None]


class Part:
    """What replicas do between two calls of Python."""

    def replay(self) -> None:
        """Does it again."""
        raise NotImplementedError

    def free(self) -> None:
        """Gives back its memory, if it holds some."""


class Graphs:
    """Captures what the replicas of one run do, part by part; in itself, it captures nothing.

    Attributes:
        streams: The stream of each replica, where each memory has its own.
        is_apart: Whether nothing that passes between replicas can be captured.
        is_on_host: Whether replicas are on CPUs, where all that is captured happens meanwhile. On
            GPUs, `finish` makes it happen.
        is_joint: Whether what passes between workers is captured, too.
        call_each: Makes one call on the thread of each replica, on CPUs.
        has_drawn: Whether a replica has drawn random numbers.
        logs: What the replicas called in each part, on CPUs.
        named: The names in the code that they ran, on CPUs.
        written: The addresses of storages from outside that they wrote to, on CPUs.
        reason: Why the run cannot be captured; empty as long as it can.
    """

    is_apart = is_on_host = is_joint = False
    call_each: Any = None
    has_drawn: Any = False

    def __init__(self, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        self.streams = streams
        self.reason = ""
        self.logs: Logs = []
        self.named: set[str] = set()
        self.written: set[int] = set()

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, nothing disturbs the captures."""
        return contextlib.nullcontext()

    def on_replica(self, replica_id: int) -> contextlib.AbstractContextManager[None]:
        """Within the block, the current thread runs a replica."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Begins a part."""

    def end(self) -> Any:
        """Ends a part that does not become one of a capture."""

    def finish(self, held: Sequence[Tensor] | None = None) -> Part | None:
        """Ends a part. Python reads the tensors that are `held`, or any that there are."""

    def refuse(self, reason: str) -> None:
        """Notes why the run cannot be captured; the first reason counts. What happens goes on."""
        self.reason = self.reason or reason

    def attempt(self, work: Callable[[], Any]) -> tuple[Any, Part | None]:
        """On CPUs: does some work as a part; returns its result and the part, if there is one."""
        return work(), None

    def kept(self, tensor: Tensor) -> Tensor:
        """Returns where a result of the run is after every replay."""
        return tensor


@dataclass(eq=False)
class _Call(Part):
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
                self._graphs.end()
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

    def shows_gradients(self) -> bool:
        """Whether parameters have the gradients that they have after a replay."""
        return self._end is not None and self._end.are_shown()

    def replay(self, *, shows_gradients: bool = False) -> None:
        """Does what the recorded run did; `shows_gradients` if they are known to be shown."""
        is_same = not self._start.fill() and not self._calls and shows_gradients
        if not self._calls:
            self._replay_parts()
        else:
            self._mirrors.watch.stamp()
            self._mirrors.fronts.up_during(self._replay_parts)
        if self._end is not None:
            self._end.restore(are_shown=is_same)

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


def room_like(tensor: Tensor) -> Tensor:
    """Returns memory for a tensor, with the same layout and alignment."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    width = tensor.element_size()
    held = torch.empty(span + _LINE // width, dtype=tensor.dtype, device=tensor.device)
    begin = (tensor.data_ptr() - held.data_ptr()) % _LINE // width
    return held.as_strided(tensor.shape, tensor.stride(), begin)


def without_repetition(tensor: Tensor) -> Tensor:
    """Returns a tensor without what `expand` has repeated."""
    for place, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(place, 0, 1)
    return tensor


class WithoutHistory(torch.autograd.Function):
    """Makes a result that seems to have a history, as that of the eager step, and has none."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        """Returns a copy."""
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raises."""
        raise CaptureError(
            "`backward()` was called on a result of a step that `unisono.function` has captured, "
            "and a replay does not note what gradients need. Call it in the step, or return "
            "`result.detach()`."
        )

    @classmethod
    def of(cls, result: Tensor) -> Tensor:
        """Returns a copy of a result."""
        copy: Tensor = cls.apply(result.detach().requires_grad_())  # type: ignore[no-untyped-call]
        return copy


class Capture:
    """A recording, where it reads the arguments, and where its results are."""

    def __init__(self, recording: Recording, tensors: Sequence[Tensor]) -> None:
        self.recording = recording
        # Copies of the arguments, where the graphs will read them.
        made: dict[int, Tensor] = {}
        alike: dict[Hashable, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if id(tensor) not in made:
                made[id(tensor)] = room_like(tensor)
                alike.setdefault((tensor.dtype, tensor.device), []).append(i)
        self.rooms = [made[id(tensor)] for tensor in tensors]
        # The rooms without dimensions that repeat the same memory, and whether there are such.
        distinct = [without_repetition(room) for room in self.rooms]
        self._repeats = any(map(operator.is_not, distinct, self.rooms))
        # Those of one dtype on one GPU, which one kernel can fill, and the numbers of what fills
        # them. A step may call `requires_grad_()` of an argument.
        groups = alike.values()
        self._alike = [([distinct[i].detach() for i in numbers], numbers) for numbers in groups]
        # Where results are, the numbers of those that one kernel can copy, and how to copy others.
        self._outputs: Any = None
        self._kept: list[Tensor] = []
        self._results: dict[Hashable, list[int]] = {}
        self._copied_alone: dict[int, Callable[[Tensor], Tensor]] = {}
        self.fill(tensors)

    def note_outputs(self, results: Any) -> None:
        """Takes what the captured run has returned."""
        self._outputs = self.recording.kept(results)
        for i, (kept, own) in enumerate(
            zip(tensors_of(self._outputs), tensors_of(results), strict=True)
        ):
            self._kept.append(kept)
            if own.grad_fn is not None:
                # Its history no replay makes again.
                self._copied_alone[i] = WithoutHistory.of
            elif kept.requires_grad or kept.is_inference():
                self._copied_alone[i] = Tensor.clone
            else:
                self._results.setdefault((kept.dtype, kept.device), []).append(i)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copies the arguments of this call to where the graphs read them."""
        if self._repeats:
            tensors = list(map(without_repetition, tensors))
        for rooms, numbers in self._alike:
            copy_each(rooms, [tensors[i] for i in numbers], non_blocking=True)

    def results(self) -> Any:
        """Returns copies of the results, which the next replay does not change."""
        made = list(map(torch.empty_like, self._kept))
        for i, copied in self._copied_alone.items():
            made[i] = copied(self._kept[i])
        for numbers in self._results.values():
            copy_each([made[i] for i in numbers], [self._kept[i] for i in numbers])
        new = iter(made)
        return map_tensors(lambda _: next(new), self._outputs)
