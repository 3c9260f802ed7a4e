"""Eager runs before a capture, which find out whether the step can be captured."""

from __future__ import annotations

import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from unisono.engines import RunGenerators
from unisono.functions.signature import ModuleState, OuterVariables
from unisono.values import DistributedValues, flatten
from unisono.variables import Mirrors, Settings, plain_class, watch_updates

HOST_RANDOMNESS = "it draws random numbers on the host; draw them on the GPU, or before `run`"
# Frames of these are not the user's program.
_LIBRARIES = (
    os.path.dirname(torch.__file__),
    os.path.dirname(os.path.dirname(__file__)),
    warnings.__file__,
)


class Rehearsal:
    """Watches one eager run."""

    generators: RunGenerators | None = None
    is_capturing = False

    def __init__(self, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        self.streams = streams
        self.reason = ""
        self.settings: list[Settings] = []
        self.waiting: set[str] = set()

    def refuse(self, reason: str) -> None:
        """Notes why the step cannot be captured; the first reason counts."""
        self.reason = self.reason or reason

    def call(self, what: str, work: Callable[[], Any], settings: Settings | None = None) -> Any:
        """Makes a call that Python will make at every replay, too; its results must be tensors."""
        can_be_captured = settings is not None and settings.can_be_captured
        # Python may wait there, unless the call is to become a part of a graph.
        with _waits(lambda _: self.waiting.add(what)):
            result = work()
        if settings is not None and can_be_captured:
            self.settings.append(settings)
        for leaf in flatten(result)[0]:
            if not isinstance(leaf, (Tensor, DistributedValues, type(None))):
                self.refuse(
                    f"{what} gives the replicas {leaf!r}, a value of Python on which the rest of "
                    "the step may depend; return a tensor or nothing"
                )
        return result

    @contextmanager
    def watching(self, mirrors: Mirrors, outer: OuterVariables) -> Iterator[None]:
        """Within the block, notes what a replay could not do again."""
        if not mirrors.is_single:
            mirrors.refresh()
        clones = [clone for _, clone in mirrors.clones_of([0])]
        state = ModuleState()
        state.number(mirrors.modules() + clones)
        variables, drawn = outer.values(), _host_randomness()
        with _waits(self.refuse), outsiders(mirrors, self.refuse):
            yield
        if name := state.changed():
            self.refuse(f"it sets {name}, which every replay would leave as it is")
        now = outer.values()
        changed = [name for name in now if name in variables and now[name] != variables[name]]
        if changed:
            self.refuse(f"it changes the variable `{changed[0]}`, which no replay would do")
        if _host_randomness() != drawn:
            self.refuse(HOST_RANDOMNESS)


@contextmanager
def outsiders(mirrors: Mirrors, refuse: Callable[[str], None]) -> Iterator[None]:
    """Within the block, tells of models and optimizers that a single replica has from outside.

    A replay would not see what becomes of them. With several replicas they are refused anyway.
    """
    if not mirrors.is_single:
        yield
        return
    known = set(map(id, mirrors.modules()))

    def on_call(module: nn.Module, _: Any) -> None:
        tensors = (*module._parameters.values(), *module._buffers.values())
        if id(module) not in known and any(tensor is not None for tensor in tensors):
            refuse(f"{type(module).__name__} was made outside `strategy.scope()`")

    def on_update(optimizer: Optimizer, *_: Any) -> None:
        if plain_class(type(optimizer)) is type(optimizer):
            refuse(f"{type(optimizer).__name__} was made outside `strategy.scope()`")

    hooks = (register_module_forward_pre_hook(on_call), watch_updates(on_update))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _waits(refuse: Callable[[str], None]) -> Iterator[None]:
    """Within the block, tells of the first line of the program at which torch waits for a GPU."""
    before = torch.cuda.get_sync_debug_mode()

    def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if "synchronizing" in str(message):
            refuse(f"it waits for the GPU at {line_of(traceback.extract_stack())}")
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


def _host_randomness() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)
    _, keys, position, *_ = state
    return random.getstate(), keys[:2].tolist(), position


def line_of(frames: traceback.StackSummary) -> str:
    """Returns the innermost line of the user's program."""
    own = [frame for frame in frames if not any(part in frame.filename for part in _LIBRARIES)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.line})"
