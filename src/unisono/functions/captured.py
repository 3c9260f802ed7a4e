"""The captures of functions under one strategy."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.engines import ReplicaGenerators, RunGenerators
from unisono.errors import CaptureError
from unisono.functions.recording import Lanes, Recording
from unisono.functions.rehearsal import HOST_RANDOMNESS, Rehearsal, line_of
from unisono.functions.signature import (
    ModuleState,
    OuterVariables,
    constant,
    is_input,
    modes,
    read_inputs,
)
from unisono.functions.step_function import Function
from unisono.torch_private import copy_each
from unisono.tracing import span
from unisono.values import DistributedValues, PerReplica, map_leaves
from unisono.variables import Mirrors, Settings

# cuBLAS, cuDNN and the allocator set themselves up in the first calls, which no graph may hold.
_NUM_EAGER = 2
# So many signatures suit batches of a few lengths; with more of them the shapes keep changing.
_MAX_SIGNATURES = 16
# How often the settings of an optimizer may change before its updates stay outside the graphs.
_MAX_CHANGES = 3
_MAX_FUNCTIONS = 64

_logger = logging.getLogger("unisono")


class Run(Protocol):
    """Runs a step on all replicas, as `Strategy.run` does."""

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        weights: Sequence[float],
        recorder: Recording | Rehearsal | None = None,
    ) -> Any:
        """Returns what the replicas return."""


class Captures:
    """The functions that one strategy has captured."""

    def __init__(
        self,
        places: Sequence[torch.device],
        mirrors: Mirrors,
        generators: Sequence[ReplicaGenerators],
        run: Run,
    ) -> None:
        self.places = places
        self._generators = generators
        self.mirrors = mirrors
        self._run = weakref.WeakMethod(run)
        self._functions: dict[Hashable, _CapturedFunction] = {}
        self._lanes: Lanes | None = None

    def run(
        self,
        function: Function[Any, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        weights: Sequence[float],
    ) -> Any:
        """Runs a function on all replicas, as fast as it can be run."""
        if all(place.type != "cuda" for place in self.places):
            return self.eagerly(function.fn, args, kwargs, weights)
        captured = self._functions.get(function.fn)
        if captured is None:
            captured = self._functions[function.fn] = _CapturedFunction(function, self)
            if len(self._functions) > _MAX_FUNCTIONS:
                del self._functions[next(iter(self._functions))]
                captured.stay_eager(
                    f"it is one of {_MAX_FUNCTIONS} functions that this strategy was given; make "
                    "a function once, outside the loop"
                )
        if not captured.reason and any(place.type != "cuda" for place in self.places):
            captured.stay_eager("some replicas are on CPUs, and only work of GPUs is captured")
        return captured(args, kwargs, weights)

    @property
    def eagerly(self) -> Run:
        """What runs a step eagerly."""
        run = self._run()
        assert run is not None
        return run

    @property
    def lanes(self) -> Lanes:
        """The memories of the replicas, with their streams and pools."""
        if self._lanes is None:
            self._lanes = Lanes(self.mirrors.memories, self.places)
        return self._lanes

    def begin_drawing(self) -> RunGenerators:
        """Before a replay, or a capture: seeds the generators as a run does."""
        of_run = RunGenerators()
        for own in (*self._generators, self._generators[0].for_all):
            if own is not None:
                own.begin(of_run)
        # A graph draws from them without asking.
        self.drawn_from()
        return of_run

    def drawn_from(self) -> list[torch.Generator]:
        """Returns the generators that graphs draw from, one for each replica."""
        pairs = zip(self._generators, self.places, strict=True)
        return [own.on(place) for own, place in pairs]

    def have_drawn_on_host(self) -> bool:
        """Whether a replica has drawn numbers on the CPU in the last run."""
        return not self.mirrors.is_single and any(one.has_drawn_on_host for one in self._generators)

    def close(self) -> None:
        """Frees all graphs and their memory."""
        self._functions.clear()
        self._lanes = None


class _Step:
    """One signature of a function: how often it has run, and its recording."""

    def __init__(self) -> None:
        self.num_eager = 0
        self.recording: Recording | None = None
        # Where the graphs read the arguments.
        self.rooms: list[Tensor] = []
        # The numbers of those of one dtype on one GPU, which one kernel can fill.
        self._alike: list[list[int]] = []
        self.outputs: Any = None

    def make_rooms(self, tensors: Sequence[Tensor]) -> None:
        """Takes copies of the arguments, where the graphs will read them."""
        self.rooms = [tensor.clone() for tensor in tensors]
        alike: dict[Hashable, list[int]] = {}
        for i, room in enumerate(self.rooms):
            alike.setdefault((room.dtype, room.device), []).append(i)
        self._alike = list(alike.values())

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copies the arguments of this call to where the graphs read them."""
        for numbers in self._alike:
            rooms, given = [self.rooms[i] for i in numbers], [tensors[i] for i in numbers]
            copy_each(rooms, given, non_blocking=True)

    def results(self) -> Any:
        """Returns copies of the results, which the next replay does not change."""
        into: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, DistributedValues):
                return _with_values(leaf, tuple(map(copied, leaf.values)))
            if not isinstance(leaf, Tensor) or leaf.requires_grad or leaf.is_inference():
                return leaf.clone() if isinstance(leaf, Tensor) else leaf
            new = torch.empty_like(leaf)
            made, kept = into.setdefault((leaf.dtype, leaf.device), ([], []))
            made.append(new)
            kept.append(leaf)
            return new

        results = map_leaves(copied, self.outputs)
        for made, kept in into.values():
            copy_each(made, kept)
        return results


class _CapturedFunction:
    """Runs a function eagerly, captures it, and replays it."""

    def __init__(self, function: Function[Any, Any], captures: Captures) -> None:
        self._function = function
        self._of = captures
        self._outer = OuterVariables(function.fn)
        self._state = ModuleState()
        self._steps: dict[Hashable, _Step] = {}
        # The settings of optimizers in the last eager call, and how often they changed.
        self._settings: list[Settings] = []
        self._num_changes = 0
        # Calls that were seen to wait for the GPU, which no graph can do.
        self._waiting: set[str] = set()
        self.reason = self._last_reason = ""

    def __call__(
        self, args: Sequence[Any], kwargs: dict[str, Any], weights: Sequence[float]
    ) -> Any:
        inputs = read_inputs((tuple(args), kwargs))
        if inputs.reason and not self.reason:
            self.stay_eager(inputs.reason)
        # A replica without samples is undone by Python; such a batch comes once in an epoch.
        if self.reason or 0.0 in weights:
            return self._eagerly(args, kwargs, weights)
        key = (inputs.key, tuple(weights), modes(), self._program())
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= _MAX_SIGNATURES:
                self.stay_eager(
                    f"it was called with {_MAX_SIGNATURES} signatures: shapes, numbers among its "
                    "arguments or attributes of modules that keep changing. Pad batches to a few "
                    "sizes, and pass numbers as tensors on the GPU"
                )
                return self._eagerly(args, kwargs, weights)
            step = self._steps[key] = _Step()
        if step.recording is not None and not all(s.are_current() for s in step.recording.settings):
            self._num_changes += 1
            step.recording = None
        if step.recording is not None:
            return self._replay(step, step.recording, inputs.tensors)
        with self._of.lanes.current():
            if step.num_eager < _NUM_EAGER:
                step.num_eager += 1
                is_last = step.num_eager == _NUM_EAGER
                return self._rehearse(args, kwargs, weights, is_last=is_last)
            return self._capture(step, args, kwargs, weights, inputs.tensors)

    def _eagerly(
        self, args: Sequence[Any], kwargs: dict[str, Any], weights: Sequence[float]
    ) -> Any:
        return self._of.eagerly(self._function.fn, args, kwargs, weights)

    def _program(self) -> Hashable:
        """Returns what the step has built in of the program: modules, gradients, variables."""
        mirrors = self._of.mirrors
        number = self._state.number(mirrors.modules())
        have_gradients = tuple([one.grad is not None for one in self._state.parameters])
        variables = self._outer.values()
        return (
            number,
            mirrors.generation,
            have_gradients,
            tuple((name, constant(value)) for name, value in variables.items()),
        )

    def _replay(self, step: _Step, recording: Recording, tensors: Sequence[Tensor]) -> Any:
        mirrors = self._of.mirrors
        with span("replay", repr(self._function)):
            if not mirrors.is_single:
                # Other memories have to get what was written to the first, at every step.
                if self._of.lanes.are_several or not mirrors.are_as_given():
                    mirrors.refresh()
                if recording.is_random:
                    self._of.begin_drawing()
                else:
                    # The caller's own random numbers go on as after any run.
                    RunGenerators()
            step.fill(tensors)
            recording.replay()
            mirrors.buffers.note_replay()
            return step.results()

    def _rehearse(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        weights: Sequence[float],
        *,
        is_last: bool,
    ) -> Any:
        """Runs eagerly, and finds out whether the step can be captured."""
        rehearsal = Rehearsal(self._of.lanes.streams)
        with rehearsal.watching(self._of.mirrors, self._outer):
            result = self._of.eagerly(self._function.fn, args, kwargs, weights, rehearsal)
        if self._of.have_drawn_on_host():
            rehearsal.refuse(HOST_RANDOMNESS)
        # A step that sets an attribute has another signature in each call, so none is the last.
        is_last = is_last or rehearsal.reason == self._last_reason
        self._last_reason = rehearsal.reason
        if rehearsal.reason and is_last:
            self.stay_eager(rehearsal.reason)
        if not all(settings.are_current() for settings in self._settings):
            self._num_changes = _MAX_CHANGES
        self._waiting = rehearsal.waiting
        # As they are after the update, which makes the state of an optimizer.
        self._settings = [Settings(settings.optimizer) for settings in rehearsal.settings]
        return result

    def _capture(
        self,
        step: _Step,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        weights: Sequence[float],
        tensors: Sequence[Tensor],
    ) -> Any:
        generators = None
        if not self._of.mirrors.is_single:
            self._of.mirrors.refresh()
            generators = self._of.begin_drawing()
        if not all(settings.are_current() for settings in self._settings):
            self._num_changes = _MAX_CHANGES
        recording = Recording(
            self._of.mirrors,
            generators,
            [] if generators is None else self._of.drawn_from(),
            self._of.lanes,
            self._waiting if self._num_changes < _MAX_CHANGES else None,
        )
        step.make_rooms(tensors)
        rooms = iter(step.rooms)
        own_args, own_kwargs = map_leaves(
            lambda leaf: _replaced(leaf, rooms), (tuple(args), kwargs)
        )
        torch.clear_autocast_cache()
        self._of.lanes.synchronize()
        try:
            with recording.recording():
                outputs = self._of.eagerly(
                    self._function.fn, own_args, own_kwargs, weights, recording
                )
        except Exception as error:
            if recording.num_calls:
                # A part of the step has happened, so it cannot be run again.
                raise
            line = line_of(traceback.extract_tb(error.__traceback__))
            self.stay_eager(f"{line}: {str(error).splitlines()[0]}")
            return self._eagerly(args, kwargs, weights)
        finally:
            torch.clear_autocast_cache()
        step.recording, step.outputs = recording, outputs
        return step.results()

    def stay_eager(self, reason: str) -> None:
        """Runs the function eagerly from now on."""
        self.reason = reason
        self._steps.clear()
        if self._function.strict:
            raise CaptureError(
                f"{self._function!r} cannot be captured: {reason}. Change that, or leave out "
                "`strict=True`."
            )
        _logger.warning("%r stays eager: %s.", self._function, reason)


def _replaced(leaf: Any, rooms: Iterator[Tensor]) -> Any:
    if isinstance(leaf, DistributedValues):
        return _with_values(leaf, tuple(_replaced(part, rooms) for part in leaf.values))
    return next(rooms) if is_input(leaf) else leaf


def _with_values(leaf: DistributedValues, values: tuple[Any, ...]) -> DistributedValues:
    if isinstance(leaf, PerReplica):
        return PerReplica.placed(values, leaf.devices, leaf.counts)
    return type(leaf).placed(values, leaf.devices)
