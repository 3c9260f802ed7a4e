"""`span`: the one line that stands wherever something is recorded.

    with span("copy", "fill pack", tensors=gradients, pack=3):

It takes a quarter of a microsecond, and one microsecond while a trace is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler
from typing_extensions import Self

from unisono.errors import ContextError

if TYPE_CHECKING:
    from unisono.tracing.lock_waits import LockWaits
    from unisono.tracing.recorder import Recorder


class Place(NamedTuple):
    """The rank of this worker, and the number of workers."""

    rank: int
    size: int


class Span:
    """A block of code that takes time; this one is not recorded."""

    __slots__ = ()

    def note(self, **arguments: Any) -> None:
        """Adds `arguments`, which are known only within the block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        return None


class _Recorded(Span):
    """A block that becomes an event when it ends, however it ends."""

    __slots__ = ("_arguments", "_category", "_name", "_recorder", "_start")

    def __init__(
        self, recorder: Recorder, category: str, name: str, arguments: dict[str, Any]
    ) -> None:
        self._recorder = recorder
        self._category = category
        self._name = name
        self._arguments = arguments

    def note(self, **arguments: Any) -> None:
        self._arguments.update(arguments)

    def __enter__(self) -> Self:
        self._start = self._recorder.clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None and kind is not StopIteration:
            self._arguments["error"] = kind.__name__
        self._recorder.add(self._start, self._category, self._name, self._arguments)


class _Within(Span):
    """A block inside another context manager."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, outer: AbstractContextManager[Any], inner: Span) -> None:
        self._outer = outer
        self._inner = inner

    def note(self, **arguments: Any) -> None:
        self._inner.note(**arguments)

    def __enter__(self) -> Self:
        self._outer.__enter__()
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._inner.__exit__(kind, *error)
        self._outer.__exit__(kind, *error)


_NOTHING = Span()
_recorder: Recorder | None = None
_waits: LockWaits | None = None
# What a replica does outside of Python, where something other than the lock may block it.
_OUTSIDE_PYTHON = frozenset(("wait", "collective", "reduce", "copy", "input"))
_lock = threading.Lock()
_place = Place(0, 1)


def span(
    category: str, name: str, tensors: Iterable[Tensor] | None = None, **arguments: Any
) -> Span:
    """Returns a context manager that records its block, if a trace or a profiler is active.

    Args:
        category: step, replica, merge, wait, reduce, copy, collective or input; compute for blocks
            of a program's own.
        name: What is done.
        tensors: The tensors that are moved, whose bytes are counted. A generator costs nothing if
            nothing records.
        arguments: Further information. The trace keeps these objects alive.
    """
    recorder, waits = _recorder, _waits
    made = _NOTHING
    if recorder is not None:
        if tensors is not None:
            arguments["bytes"] = sum(t.nbytes for t in tensors if t.layout is torch.strided)
        made = _Recorded(recorder, category, name, arguments)
    if waits is not None and category in _OUTSIDE_PYTHON:
        made = _Within(waits, made)
    if profiler._is_profiler_enabled:
        made = _Within(profiler.record_function(f"unisono::{name}"), made)
    return made


def join_workers(rank: int, size: int) -> None:
    """Sets that this process is worker `rank` of `size`, for the name of its file."""
    global _place
    _place = Place(rank, size)


def place() -> Place:
    """Returns which worker this process is."""
    return _place


@contextmanager
def metered(waits: LockWaits) -> Iterator[bool]:
    """Pauses `waits` in every span outside of Python. Yields False if another run is measured."""
    global _waits
    with _lock:
        is_mine = _waits is None
        if is_mine:
            _waits = waits
    if not is_mine:
        yield False
        return
    try:
        yield True
    finally:
        _waits = None


def is_recording() -> bool:
    """Returns whether a trace is being recorded."""
    return _recorder is not None


def start(recorder: Recorder) -> None:
    """Sends every event to `recorder` from now on."""
    global _recorder
    with _lock:
        if _recorder is None:
            _recorder = recorder
            return
    raise ContextError(
        "A trace is already being recorded, by an outer `record()` or because UNISONO_TRACE is "
        "set. Remove one of the two."
    )


def stop() -> None:
    """Stops recording."""
    global _recorder
    _recorder = None
