"""Eager runs before a capture, which find out whether the step can be captured."""

from __future__ import annotations

import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.contexts import CrossReplicaContext, current_context, entered
from unisono.engines import RunGenerators
from unisono.functions.recording import Graphs
from unisono.functions.signature import ModuleState
from unisono.functions.surroundings import Surroundings
from unisono.functions.watching import line_here
from unisono.modules import Mirrors, Settings, plain_class, sets_groups
from unisono.values import DistributedValues, flatten

_call_of_modules: Any = nn.Module.__call__
# torch puts its code around the `step` of every class of optimizers.
_update_of_optimizers: Any = Optimizer.profile_hook_step(Optimizer.step)
HOST_RANDOMNESS = (
    "it draws random numbers on the host; draw them with torch on the device of the replica, or "
    "before `run`"
)


class Rehearsal:
    """Watches one eager run.

    Args:
        surroundings: What the step may use.
        graphs: What notes the operators of replicas on CPUs; on GPUs it notes nothing.
    """

    generators: RunGenerators | None = None
    is_capturing = is_joint = False
    call_each = None

    def __init__(self, surroundings: Surroundings, graphs: Graphs) -> None:
        self._surroundings = surroundings
        self._graphs = graphs
        self.streams = graphs.streams
        self.is_on_host = graphs.is_on_host
        self.is_apart = graphs.is_on_host or bool(graphs.streams)
        self.on_replica = graphs.on_replica
        self._of_optimizers: list[Settings] = []
        self.reason = ""
        self.settings: list[Settings] = []
        self.waiting: set[str] = set()

    def refuse(self, reason: str) -> None:
        """Notes why the step cannot be captured; the first reason counts."""
        self.reason = self.reason or reason

    def call(self, what: str, work: Callable[[], Any], settings: Settings | None = None) -> Any:
        """Makes a call that Python will make at every replay, too; its results must be tensors."""
        can_be_captured = settings is not None and settings.can_be_captured
        self._as_program(self._check_program)
        # Python may wait there, unless the call is to become a part of a graph.
        self._graphs.end()
        with _waits(lambda _: self.waiting.add(what)):
            result = work()
        self._graphs.begin()
        self._as_program(self._surroundings.allow_changes)
        is_update = settings is not None or what.startswith("GradScaler")
        read = self._surroundings.scheduled
        if read and what.endswith(".step()") and not is_update:
            self.refuse(f"it reads `{min(read)}`, which {what} may change; read it after `run`")
        self._of_optimizers = [Settings(one.optimizer) for one in self._of_optimizers]
        if settings is not None and can_be_captured:
            self.settings.append(settings)
        for leaf in flatten(result)[0]:
            if not isinstance(leaf, (Tensor, DistributedValues, type(None))):
                self.refuse(
                    f"{what} gives the replicas {leaf!r}, a value of Python on which the rest of "
                    "the step may depend; return a tensor or nothing"
                )
        return result

    @staticmethod
    def _as_program(look: Callable[[], None]) -> None:
        """Looks at what the program has, also on the thread of a replica, which sees its clones."""
        with entered(CrossReplicaContext(current_context().replicas)):
            look()

    def _check_program(self) -> None:
        """Refuses what the step itself has changed, outside of calls that Python makes again."""
        for settings in self._of_optimizers:
            if name := settings.changed():
                self.refuse(sets_groups(settings.optimizer, name))
        if name := self._surroundings.changed():
            self.refuse(f"it changes `{name}`, which no replay would do")

    @contextmanager
    def watching(self, mirrors: Mirrors, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Within the block, notes what a replay with such inputs could not do again."""
        if not mirrors.is_single:
            mirrors.refresh()
        modules = mirrors.modules() + [clone for _, clone in mirrors.clones_of([0])]
        state = ModuleState(lambda: modules)
        state.number()
        generators = self._surroundings.generators
        drawn = _host_randomness(generators)
        if self._surroundings.iterator:
            self.refuse(f"it uses the iterator or queue {self._surroundings.iterator!r}")
        before = _versions(inputs)
        self._of_optimizers = [Settings(one) for one in mirrors.fronts.of_kind(Optimizer)]
        with _waits(self.refuse), outsiders(mirrors, self.refuse):
            self._graphs.begin()
            yield
            self._graphs.end()
            self.refuse(self._graphs.reason)
        # On GPUs, the counts of torch are all that is known.
        are_written = [one.untyped_storage()._cdata in self._graphs.written for one in inputs]
        if any(are_written) or _versions(inputs) != before:
            self.refuse("it writes to an argument; write to a copy")
        if name := state.changed():
            self.refuse(f"it sets {name}, which every replay would leave as it is")
        self._check_program()
        if _host_randomness(generators) != drawn:
            self.refuse(HOST_RANDOMNESS)
        self._surroundings.take([], self._graphs.named)


@contextmanager
def outsiders(mirrors: Mirrors, refuse: Callable[[str], None]) -> Iterator[None]:
    """Within the block, tells of models and optimizers that a single replica has from outside.

    A replay would not see what becomes of them. With several replicas they are refused anyway.
    """
    if not mirrors.is_single:
        yield
        return
    known = set(map(id, mirrors.modules()))

    # A profile function is of one thread. torch has one table of hooks for all threads, and others
    # may be going through it.
    def note(frame: types.FrameType, event: str, _: Any) -> None:
        outsider = None
        if event == "call" and frame.f_code is _call_of_modules.__code__:
            module = frame.f_locals["self"]
            tensors = (*module._parameters.values(), *module._buffers.values())
            if id(module) not in known and any(one is not None for one in tensors):
                outsider = module
        elif event == "call" and frame.f_code is _update_of_optimizers.__code__:
            optimizer = frame.f_locals["args"][0]
            if plain_class(type(optimizer)) is type(optimizer):
                outsider = optimizer
        if outsider is not None:
            refuse(f"{type(outsider).__name__} was made outside `strategy.scope()`")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def _waits(refuse: Callable[[str], None]) -> Iterator[None]:
    """Within the block, tells of the first line of the program at which torch waits for a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()

    def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if "synchronizing" in str(message):
            refuse(f"it waits for the GPU at {line_here()}")
        else:
            show(message, category, filename, lineno, *rest)

    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if one.is_inference() else one._version for one in tensors]


def _host_randomness(generators: Sequence[Any]) -> list[Any]:
    """Returns the states of Python's and NumPy's generators, and of those that a step may use."""
    state: Any = np.random.get_state(legacy=True)
    _, keys, position, *_ = state
    return [random.getstate(), keys[:2].tolist(), position, *map(_state_of, generators)]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.get_state(legacy=False))
