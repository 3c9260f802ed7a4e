"""The captures of functions under one strategy."""

from __future__ import annotations

import types
import weakref
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from unisono.engines import RunGenerators
from unisono.functions.captured import CapturedFunction
from unisono.functions.cpu_graphs import CpuGraphs
from unisono.functions.cuda_graphs import CudaGraphs, Lanes, Together
from unisono.functions.recording import Graphs
from unisono.functions.signature import Same

if TYPE_CHECKING:
    from unisono.functions.step_function import Function
    from unisono.strategies.runner import Runner
    from unisono.strategies.worker import WorkerReplicas

_MAX_FUNCTIONS = 64


class Captures:
    """The functions that one strategy has captured."""

    def __init__(self, replicas: WorkerReplicas, runner: Runner) -> None:
        self.places = runner.places
        self._generators = runner.generators
        self.mirrors = replicas.mirrors
        self._call_each = runner.call_each
        self._replicas = weakref.ref(replicas)
        self.is_on_host = all(place.type == "cpu" for place in self.places)
        self._functions: dict[Hashable, CapturedFunction] = {}
        # What the log says already. A function that is made in a loop has the same line every time.
        self.told: set[str] = set()
        self._lanes: Lanes | None = None
        self._together: Together | None = None

    @property
    def replicas(self) -> WorkerReplicas:
        """The replicas."""
        replicas = self._replicas()
        assert replicas is not None
        return replicas

    def run(
        self,
        function: Function[Any, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        weights: Sequence[float],
    ) -> Any:
        """Runs a function on all replicas, as fast as it can be run."""
        # Each access to a method makes another one, which equals the last.
        is_method = isinstance(function.fn, types.MethodType)
        key = function.fn if is_method else Same(function.fn)
        # The last in the dict is the one that was used last.
        captured = self._functions.pop(key, None) or CapturedFunction(function, self)
        self._functions[key] = captured
        if len(self._functions) > _MAX_FUNCTIONS:
            del self._functions[next(iter(self._functions))]
            captured.stay_eager(
                f"it is one of {_MAX_FUNCTIONS} functions that this strategy was given; make "
                "a function once, outside the loop"
            )
        if not captured.reason and len({place.type for place in self.places}) > 1:
            captured.stay_eager("some replicas are on CPUs and others on GPUs")
        return captured(args, kwargs, weights)

    @property
    def lanes(self) -> Lanes:
        """The memories of replicas on GPUs, with their streams and pools."""
        if self._lanes is None:
            self._lanes = Lanes(self.mirrors.memories, self.places)
        return self._lanes

    @property
    def together(self) -> Together | None:
        """What all workers capture together; None if none of them captures what they exchange."""
        engine = self.replicas.workers.graph_engine
        if engine is None or self.is_on_host or self.replicas.hook is not None:
            return None
        if self.lanes.are_several:
            return None
        if self._together is None:
            self._together = Together(self.replicas.workers, engine)
        return self._together

    def on_streams(self) -> AbstractContextManager[None]:
        """Within the block, this thread uses the streams on which graphs are captured."""
        return nullcontext() if self.is_on_host else self.lanes.current()

    def cpu_graphs(self) -> CpuGraphs:
        """Returns what notes what replicas on CPUs do."""
        pairs = zip(self._generators, self.places, strict=True)
        is_single = self.mirrors.is_single
        drawn_from = [None if is_single else own.unseeded(place) for own, place in pairs]
        return CpuGraphs(drawn_from, self._call_each)

    def graphs(self, together: Together | None) -> Graphs:
        """Returns what captures a run, `together` with that of all other workers."""
        if self.is_on_host:
            return self.cpu_graphs()
        drawn_from = [] if self.mirrors.is_single else self.drawn_from()
        return CudaGraphs(self.lanes, drawn_from, together)

    def begin_drawing(self, *, seeds: bool) -> RunGenerators:
        """Before a replay, or a capture: replicas draw other numbers than in the last run.

        Args:
            seeds: Whether graphs may draw. They do not ask for a seed before, as others do.
        """
        of_run = RunGenerators()
        for own in (*self._generators, self._generators[0].for_all):
            if own is not None:
                own.begin(of_run)
        if seeds:
            self.drawn_from()
        return of_run

    def drawn_from(self) -> list[torch.Generator]:
        """Returns the generators that graphs draw from, one for each replica."""
        pairs = zip(self._generators, self.places, strict=True)
        return [own.on(place) for own, place in pairs]

    def have_drawn_elsewhere(self) -> bool:
        """Whether a replica on a GPU has drawn numbers on the CPU in the last run."""
        if self.is_on_host or self.mirrors.is_single:
            return False
        return any(one.has_drawn_on_host for one in self._generators)

    def close(self) -> None:
        """Frees all graphs and their memory."""
        for one in self._functions.values():
            one.free()
        self._functions.clear()
        self._lanes = None
