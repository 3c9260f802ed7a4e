"""A function that runs eagerly, is captured, and is replayed."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import operator
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.engines import CallerModes, RunGenerators, has_compiled
from unisono.errors import CaptureError, add_note
from unisono.functions.cpu_graphs import difference
from unisono.functions.cuda_graphs import CAPTURE, NOTHING, Together
from unisono.functions.recording import Capture, Graphs, Logs, Recording
from unisono.functions.rehearsal import HOST_RANDOMNESS, Rehearsal
from unisono.functions.signature import (
    Members,
    ModuleState,
    frozen,
    is_input,
    modes,
    read_inputs,
)
from unisono.functions.surroundings import Surroundings
from unisono.functions.watching import line_of
from unisono.modules import Settings
from unisono.modules.leaves import gradient_of
from unisono.tracing import span
from unisono.values import DistributedValues, flatten, map_tensors

if TYPE_CHECKING:
    from unisono.functions.captures import Captures
    from unisono.functions.step_function import Function

# cuBLAS, cuDNN and the allocator set themselves up in the first calls, which no graph may hold.
_NUM_EAGER = 2
# So many signatures suit batches of a few lengths; with more of them the shapes keep changing.
_MAX_SIGNATURES = 16
# How often the settings of an optimizer may change before its updates stay outside the graphs.
_MAX_CHANGES = 3
# How often workers capture a signature together, each time with other signatures of the others; and
# how often one runs eagerly because others are not ready, before it captures alone.
_MAX_TOGETHER = 4
_MAX_WAITS = 2

_logger = logging.getLogger("unisono")


class _Run(NamedTuple):
    """What a function is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: Sequence[float]
    tensors: Sequence[Tensor] = ()


class _Step:
    """One signature of a function: how often it has run, and what was captured of it."""

    def __init__(self) -> None:
        self.num_eager = 0
        # What the first run has returned besides tensors.
        self.returned: list[Hashable] | None = None
        # What the replicas called in the last eager run, if they are on CPUs.
        self.logs: Logs = []
        # What this worker has captured alone, and what it has captured with all others.
        self.own: Capture | None = None
        self.joint: Capture | None = None
        self.joint_number = NOTHING
        # How often workers have captured it together, and how often others could not.
        self.num_together = self.num_waits = 0

    @property
    def captures(self) -> list[Capture]:
        """All that was captured of it."""
        return [one for one in (self.own, self.joint) if one is not None]

    def wish(self) -> tuple[int, bool]:
        """Returns what this worker could replay with the others, and whether it could capture."""
        is_ready = self.num_eager == _NUM_EAGER and self.num_together < _MAX_TOGETHER
        return self.joint_number if self.joint is not None else NOTHING, is_ready

    def drop_outdated(self) -> bool:
        """Forgets what was captured with other settings of an optimizer; returns whether it did."""
        outdated = [
            one for one in self.captures if not all(s.are_current() for s in one.recording.settings)
        ]
        self.own, self.joint = (None if one in outdated else one for one in (self.own, self.joint))
        return bool(outdated)


class CapturedFunction:
    """Runs a function eagerly, captures it, and replays it."""

    def __init__(self, function: Function[Any, Any], captures: Captures) -> None:
        self._function = function
        self._of = captures
        mirrors = captures.mirrors
        self._surroundings = Surroundings(function.fn, mirrors.modules)
        fronts = mirrors.fronts
        self._members = Members(functools.partial(fronts.of_kind, Optimizer), [fronts.added])
        self._state = ModuleState(mirrors.modules, (mirrors.mirrors, mirrors.singles))
        self._steps: dict[Hashable, _Step] = {}
        # What was replayed last, whether parameters had its gradients in the last two calls, and
        # which parameters had one.
        self._last: Capture | None = None
        self._are_shown = False
        self._have_gradients: Hashable = None
        # The settings of optimizers in the last eager call, and how often they changed.
        self._settings: list[Settings] = []
        self._num_changes = 0
        # Calls that were seen to wait for the GPU, which no graph can do.
        self._waiting: set[str] = set()
        self.reason = self._last_reason = ""

    def __call__(
        self, args: Sequence[Any], kwargs: dict[str, Any], weights: Sequence[float]
    ) -> Any:
        step, run = self._find(_Run(tuple(args), kwargs, weights))
        together, agreed = self._of.together, NOTHING
        if together is not None:
            agreed = together.agreed(*((NOTHING, False) if step is None else step.wish()))
        if step is None:
            return self._eagerly(run)
        capture = step.own if agreed == NOTHING else step.joint if agreed != CAPTURE else None
        if capture is not None:
            return self._replay_or_tell(capture, run)
        with self._of.on_streams(), without_garbage():
            if step.num_eager < _NUM_EAGER:
                return self._rehearse(step, run)
            if agreed == CAPTURE:
                return self._capture(step, run, together)
            if together is not None and step.num_waits < _MAX_WAITS:
                # The others may be ready next time.
                step.num_waits += 1
                return self._eagerly(run)
            return self._capture(step, run)

    def _find(self, run: _Run) -> tuple[_Step | None, _Run]:
        """Returns the signature of a run, or None if it must be eager, and the run with tensors."""
        if self.reason:
            return None, run
        inputs = read_inputs(run.args, run.kwargs, self._of.places[0].type)
        if inputs.reason:
            self.stay_eager(inputs.reason)
        # A replica without samples is undone by Python; such a batch comes once in an epoch. Modes
        # such as `FlopCounterMode`, and `detect_anomaly`, see nothing of a replay.
        is_watched = torch.is_anomaly_enabled() or CallerModes.of_this_thread() is not None
        if self.reason or 0.0 in run.weights or is_watched:
            return None, run
        self._surroundings.take(inputs.objects, set())
        key = (inputs.key, tuple(run.weights), modes(), self._program())
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= _MAX_SIGNATURES:
                self.stay_eager(
                    f"it was called with {_MAX_SIGNATURES} signatures: shapes, numbers among its "
                    "arguments, or variables, attributes or settings of optimizers that keep "
                    "changing. Pad batches to a few sizes, and pass numbers as tensors"
                )
                return None, run
            if self._of.is_on_host and has_compiled(self._function.fn):
                self.stay_eager("it calls what `torch.compile` has compiled")
                return None, run
            step = self._steps[key] = _Step()
        if step.drop_outdated():
            self._num_changes += 1
            self._last = None
        may_look = self._of.is_on_host or self._of.mirrors.is_single
        if step.own is None and may_look and sys.getprofile() is not None:
            # What looks for reasons not to capture is a profiler, too.
            return None, run
        return step, run._replace(tensors=inputs.tensors)

    def _eagerly(self, run: _Run, recorder: Any = None) -> Any:
        replicas = self._of.replicas
        return replicas.run_eagerly(self._function.fn, run.args, run.kwargs, run.weights, recorder)

    def _program(self) -> Hashable:
        """Returns what the step has built in of the program: modules, gradients, variables."""
        before, state = self._state.parameters, self._state.number()
        were_shown, last = self._are_shown, self._last
        self._are_shown = last is not None and last.recording.shows_gradients()
        if not (were_shown and self._are_shown and self._state.parameters is before):
            # Without a call of Python for each parameter, as there may be thousands.
            grads = map(gradient_of, self._state.parameters)
            self._have_gradients = bytes(map(operator.is_not, grads, itertools.repeat(None)))
        numbers = state, self._members.number(), self._surroundings.number()
        return numbers, self._of.mirrors.generation, self._have_gradients

    def _replay_or_tell(self, capture: Capture, run: _Run) -> Any:
        """Replays, or lets an eager run say which line of the program fails."""
        recording = capture.recording
        state = torch.default_generator.get_state() if recording.begins_pure else None
        try:
            return self._replay(capture, run)
        except RuntimeError as error:
            if not recording.is_untouched:
                add_note(error, f"Raised in a replay of {self._function!r}.")
                raise
        assert state is not None
        # It draws the same numbers.
        torch.default_generator.set_state(state)
        return self._eagerly(run)

    def _replay(self, capture: Capture, run: _Run) -> Any:
        mirrors, recording = self._of.mirrors, capture.recording
        with span("replay", repr(self._function)), self._of.replicas.replaying(run.weights):
            if not mirrors.is_single:
                # Buffers, and other memories, get what was written to the first, at every step.
                if recording.is_apart or mirrors.is_stale:
                    mirrors.refresh()
                if recording.is_random:
                    self._of.begin_drawing(seeds=recording.has_drawn)
                else:
                    # The caller's own random numbers go on as after any run.
                    RunGenerators()
            capture.fill(run.tensors)
            recording.replay(shows_gradients=self._are_shown and capture is self._last)
            self._last, self._are_shown = capture, self._are_shown and capture is self._last
            mirrors.buffers.note_replay()
            return capture.results()

    def _rehearse(self, step: _Step, run: _Run) -> Any:
        """Runs eagerly, and finds out whether the step can be captured."""
        graphs = self._of.cpu_graphs() if self._of.is_on_host else Graphs(self._of.lanes.streams)
        rehearsal = Rehearsal(self._surroundings, graphs)
        with rehearsal.watching(self._of.mirrors, run.tensors):
            result = self._eagerly(run, rehearsal)
        # One that fails, or that Ctrl-C ends, has called only a part.
        step.num_eager += 1
        if self._of.have_drawn_elsewhere():
            rehearsal.refuse(HOST_RANDOMNESS)
        step.logs = graphs.logs
        step.returned, before = list(map(frozen, _plain_parts(result))), step.returned
        if before not in (None, step.returned):
            rehearsal.refuse(
                "it returns another object or number in every call; return tensors, in lists, "
                "tuples, dicts or dataclasses"
            )
        # A step that sets an attribute has another signature in each call, so none is the last.
        is_last = step.num_eager == _NUM_EAGER or rehearsal.reason == self._last_reason
        self._last_reason = rehearsal.reason
        if rehearsal.reason and is_last:
            self.stay_eager(rehearsal.reason)
        if not all(settings.are_current() for settings in self._settings):
            self._num_changes = _MAX_CHANGES
        self._waiting = rehearsal.waiting
        # As they are after the update, which makes the state of an optimizer.
        self._settings = [Settings(settings.optimizer) for settings in rehearsal.settings]
        return result

    def _capture(self, step: _Step, run: _Run, together: Together | None = None) -> Any:
        """Runs while the step is captured, `together` with all other workers or alone."""
        generators = None
        if not self._of.mirrors.is_single:
            self._of.mirrors.refresh()
            generators = self._of.begin_drawing(seeds=True)
        if not all(settings.are_current() for settings in self._settings):
            self._num_changes = _MAX_CHANGES
        graphs = self._of.graphs(together)
        waiting = self._waiting if self._num_changes < _MAX_CHANGES else None
        recording = Recording(self._of.mirrors, generators, graphs, waiting)
        capture = Capture(recording, run.tensors)
        rooms = iter(capture.rooms)
        own = map_tensors(lambda one: next(rooms) if is_input(one) else one, (run.args, run.kwargs))
        torch.clear_autocast_cache()
        if not self._of.is_on_host:
            self._of.lanes.synchronize()
        try:
            with recording.recording():
                results = self._eagerly(_Run(own[0], own[1], run.weights), recording)
                capture.note_outputs(results)
        except Exception as error:
            if graphs.is_on_host or recording.num_calls:
                # The step has failed, or a part of it has happened.
                raise
            if together is None:
                self.stay_eager(f"{line_of(error)}: {str(error).splitlines()[0]}")
            elif together.has_failed(error):
                # Next time, what the workers exchange stays outside of the graphs.
                step.num_together = _MAX_TOGETHER
            else:
                raise
            return self._eagerly(run)
        finally:
            torch.clear_autocast_cache()
        graphs.refuse(difference(step.logs, graphs.logs))
        if graphs.reason:
            self.stay_eager(graphs.reason)
            return results
        if together is None:
            step.own = capture
        else:
            step.joint, step.joint_number = capture, together.next_number()
            step.num_together += 1
        return capture.results()

    def free(self) -> None:
        """Frees all graphs, also those that an error still holds."""
        for step in self._steps.values():
            for capture in step.captures:
                capture.recording.free()
        self._steps.clear()
        self._last = None

    def stay_eager(self, reason: str) -> None:
        """Runs the function eagerly from now on."""
        self.reason = reason
        self.free()
        if self._function.strict:
            raise CaptureError(
                f"{self._function!r} cannot be captured: {reason}. Change that, or leave out "
                "`strict=True`."
            )
        line = f"{self._function!r} stays eager: {reason}."
        if line not in self._of.told:
            self._of.told.add(line)
            _logger.warning(line)


def _plain_parts(result: Any) -> Iterator[Any]:
    """Yields what a step has returned besides tensors."""
    for leaf in flatten(result)[0]:
        if isinstance(leaf, DistributedValues):
            yield from _plain_parts(list(leaf.values))
        elif not isinstance(leaf, Tensor):
            yield leaf


@contextmanager
def without_garbage() -> Iterator[None]:
    """Within the block, Python does not look for garbage.

    Freeing an earlier CUDA graph would end a capture, and finalizers are not a part of the step.
    """
    is_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if is_enabled:
            gc.enable()
