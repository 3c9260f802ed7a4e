"""What `torch.compile` needs to know of replicas.

The compiler keeps what it has compiled for all threads, but looks for it before it waits for its
lock: threads that need the same graph at the same time would each compile it. Nor may threads look
for a graph that was not the last one used: it is moved to the front while others look. In runs in
which this can happen, replicas therefore run one after another, and the first one compiles for all.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from unisono.values import DistributedValues, flatten

_PACKAGE = __name__.partition(".")[0]
_MARK = "_torchdynamo_orig_callable"
# Code that names one of these may give the name of a variable, attribute or setting as a string.
_BY_NAME = frozenset(
    {"__dict__", "attrgetter", "getattr", "globals", "hasattr", "param_groups", "vars"}
)
# How many functions and modules of a step are looked at, at most.
_MOST_REACHED = 10_000
_KINDS = functools.partial, types.MethodType, types.FunctionType, nn.Module
# Shapes that change in every run are compiled as dynamic ones soon.
_MAX_SIGNATURES = 16
_PLAIN = frozenset({bool, float, int, str, type(None)})
_told: list[Any] = []


class Compilations:
    """Knows in which runs of one strategy something may be compiled."""

    def __init__(self) -> None:
        # The steps, and shapes of their arguments, with which nothing was compiled.
        self._settled: set[Any] = set()
        self._signature: Any = None
        self._before = 0

    def may_come(self, step: Callable[..., Any], arguments: Iterable[Any]) -> bool:
        """Before a run: returns whether something may be compiled in it."""
        frames = tell_compiler()
        if frames is None:
            return False
        self._before = _num_compiled(frames)
        code = getattr(getattr(step, _MARK, step), "__code__", type(step))
        last, signature = self._signature, [code, torch.is_grad_enabled()]
        _add_shapes(arguments, signature)
        self._signature = tuple(signature)
        is_settled = self._signature == last and last in self._settled
        if is_settled or len(self._settled) >= _MAX_SIGNATURES:
            return False
        return has_compiled(step)

    def note(self) -> None:
        """After a run: remembers whether something was compiled."""
        frames: Any = sys.modules.get("torch._dynamo.convert_frame")
        if frames is None or self._signature is None:
            return
        if _num_compiled(frames) == self._before:
            self._settled.add(self._signature)
        elif self._signature in self._settled:
            self._settled.clear()


def has_compiled(step: Callable[..., Any]) -> bool:
    """Whether something that a step names is compiled."""
    return any(map(_is_compiled, reached(step)))


def tell_compiler() -> Any:
    """Keeps the compiler from compiling our own functions, and returns it, if there is one.

    What they do depends on the thread, and changes from run to run. A step that is compiled is cut
    where it calls them, and the parts in between are compiled.
    """
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    engine: Any = sys.modules.get("torch._dynamo.eval_frame")
    # Optimizers load the compiler, too, so most programs that have it never compile.
    if frames is None or not (_told or (engine is not None and engine.cached_backends)):
        return None
    rules: Any = sys.modules["torch._dynamo.trace_rules"]
    if rules not in _told:
        _told.append(rules)
        rules.add(_PACKAGE)
    return frames


def _num_compiled(frames: Any) -> int:
    return sum(frames.FRAME_COMPILE_COUNTER.values())


def _add_shapes(arguments: Iterable[Any], found: list[Any]) -> None:
    for value in arguments:
        if isinstance(value, torch.Tensor):
            # A nested tensor has no shape.
            found += None if value.is_nested else value.shape, value.dtype, value.layout
        elif isinstance(value, DistributedValues):
            _add_shapes(value.values, found)
        elif type(value) not in _PLAIN:
            leaves = flatten(value)[0]
            _add_shapes([one for one in leaves if one is not value], found)


def _is_compiled(thing: Any) -> bool:
    if isinstance(thing, nn.Module):
        return any(
            _MARK in held or held.get("_compiled_call_impl") is not None
            for held in (object.__getattribute__(one, "__dict__") for one in thing.modules())
        )
    return isinstance(thing, types.FunctionType) and _MARK in vars(thing)


def reached(step: Any) -> Iterator[Any]:
    """Yields what a step is made of: functions and modules that it names, and those of these."""
    # By identity. It holds them, so that no identity is used again.
    seen, waiting = {id(step): step}, [step]
    while waiting and len(seen) < _MOST_REACHED:
        thing = waiting.pop()
        yield thing
        for one in _inner(thing):
            if issubclass(type(one), _KINDS) and id(one) not in seen:
                seen[id(one)] = one
                waiting.append(one)


def _inner(thing: Any) -> Iterable[Any]:
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, types.MethodType):
        return (thing.__func__, thing.__self__, *getattr(thing.__self__, "__dict__", {}).values())
    if isinstance(thing, nn.Module):
        # Not through `type(one).forward`: a scripted module cannot be asked for it.
        kinds = {type(one) for one in thing.modules()}
        bases = [next(one for one in kind.__mro__ if "forward" in vars(one)) for kind in kinds]
        return {vars(base)["forward"] for base in bases}
    if not isinstance(thing, types.FunctionType):
        return ()
    if (thing.__module__ or "").partition(".")[0] in ("torch", _PACKAGE):
        return ()
    cells = (cell for cell in thing.__closure__ or () if cell != types.CellType())
    names = names_in(thing.__code__).intersection(thing.__globals__)
    held = [cell.cell_contents for cell in cells]
    return (*held, *(thing.__defaults__ or ()), *map(thing.__globals__.get, names))


def names_in(code: types.CodeType) -> set[str]:
    """Returns the names of variables and attributes in the code of a function."""
    names: set[str] = set()
    strings: set[str] = set()
    waiting: list[Any] = [code]
    while waiting:
        one = waiting.pop()
        if isinstance(one, types.CodeType):
            names.update(one.co_names)
            waiting += one.co_consts
        elif isinstance(one, tuple):
            waiting += one
        elif isinstance(one, str):
            strings.add(one)
    return names if names.isdisjoint(_BY_NAME) else names | strings
