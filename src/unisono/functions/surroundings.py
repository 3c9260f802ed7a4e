"""What a step finds outside itself: the variables and attributes that its code names.

A captured step has built in what they were. If one of them is another, the step has another
signature. If the step itself changes one, it cannot be captured.
"""

from __future__ import annotations

import functools
import operator
import os
import queue
import random
import sys
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.engines import names_in
from unisono.functions.signature import CONTAINERS, State, constant, frozen
from unisono.modules import TORCH_TABLES, groups_of, plain_class, raw

# Of a longer container, which is data, identity and length are enough.
_MOST_ENTRIES = 4096
_MOST_VALUES = 10_000
_MISSING = object()
# The folders of packages that pip and Linux distributions install.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# What their objects and functions keep for themselves is not the program's.
_PACKAGES = frozenset({"builtins", "numpy", "torch", "unisono"})
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
# What these hold never changes.
_NOT_READ = (str, int, float, type(None))
# Functions of C++ and torch that a step may call, and the attributes that they read.
_READ_BY = {"get_last_lr": "_last_lr"}
# What schedulers change of an optimizer and of themselves.
_SCHEDULED = ("_last_lr", "last_epoch", "param_groups")
_QUEUES = (queue.Queue, queue.SimpleQueue)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# These name all attributes, and are seen to be called if a step calls them.
_NOT_IN_STEPS = frozenset({"__init__", "__new__", "__post_init__", "__repr__", "__str__"})
# These say what surrounds the process.
_ENVIRONMENT = frozenset({"environ", "getenv"})

Place = tuple[str, Callable[[], Any]]


class Places:
    """The places that the code of some functions names.

    From the function of a step, this goes on to all that its code names: variables, attributes of
    objects, classes and modules, entries of containers, and the functions and methods among these,
    whose code names more.

    Attributes:
        found: A name, and what returns what is there.
        containers: Lists, dicts, sets and deques, also inside one another.
        tables: Dicts that count as a whole: the attributes of modules, and the environment.
        generators: Random generators of Python and NumPy.
        scheduled: The names of those that schedulers change.
        iterator: The name of an iterator that is not written in Python, or of a queue; empty if
            there is none.

    Args:
        roots: Where to begin, by name.
        named: The names in the code that is known so far. It gets more.
        known: The modules whose attributes and tensors count anyway.
    """

    def __init__(
        self, roots: Iterable[tuple[str, Any]], named: set[str], known: Iterable[nn.Module] = ()
    ) -> None:
        self._roots = list(roots)
        self._named = named
        self._known = set(map(id, known))
        num_named = -1
        while len(named) != num_named:
            # Functions that are found name attributes, in which more functions may be found.
            num_named = len(named)
            named.update(read for name, read in _READ_BY.items() if name in named)
            self._walk()
        if not named.isdisjoint(_ENVIRONMENT):
            self.tables.append(("os.environ", vars(os.environ)["_data"]))

    def _walk(self) -> None:
        self.found: list[Place] = []
        self.containers: list[tuple[str, Any]] = []
        self.tables: list[tuple[str, Any]] = []
        self.generators: list[Any] = []
        self.scheduled: set[str] = set()
        self.iterator = ""
        # By identity. It holds them, so that no identity is used again.
        seen: dict[int, Any] = {}
        waiting = deque(self._roots)
        while waiting and len(seen) < _MOST_VALUES:
            label, value = waiting.popleft()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            waiting.extend(self._inner(label, value))

    def _inner(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yields what a value is made of, as far as a step may use it."""
        if isinstance(value, _NOT_READ):
            return
        if isinstance(value, CONTAINERS):
            if _is_short(value):
                self.containers += [(label, value)] * (not isinstance(value, tuple))
                parts = value.values() if isinstance(value, dict) else value
                yield from ((label, part) for part in parts)
            else:
                self.found.append((label, functools.partial(len, value)))
        elif isinstance(value, Tensor):
            yield from self._attributes(label, vars(value))
        elif isinstance(value, (Optimizer, LRScheduler)):
            yield from self._of_optimizer(label, value)
        elif isinstance(value, functools.partial):
            yield from self._constants(label, (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.MethodType):
            yield "self", value.__self__
            yield label, value.__func__
        elif isinstance(value, (staticmethod, classmethod)):
            yield label, value.__func__
        elif isinstance(value, (property, functools.cached_property)):
            yield label, value.fget if isinstance(value, property) else value.func
        elif isinstance(value, types.FunctionType):
            if not _is_known(value.__module__):
                yield from self._of_function(label, value)
        elif isinstance(value, types.ModuleType):
            if not _is_known(value.__name__):
                yield from self._attributes(label, vars(value))
        elif isinstance(value, type):
            yield from self._of_class(label, value)
        elif isinstance(value, nn.Module):
            yield from self._of_module(label, value)
        elif isinstance(value, _GENERATORS):
            self.generators.append(value)
        elif isinstance(value, ContextVar):
            get = functools.partial(value.get, None)
            self.found.append((label, get))
            yield label, get()
        elif isinstance(value, weakref.ref):
            yield label, value()
        elif isinstance(value, (UserDict, UserList)):
            yield from self._constants(label, (value.data,))
        else:
            yield from self._of_object(label, value)

    def _of_function(self, label: str, fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
        # A wrapper has the `__module__` of what it wraps, but the variables of its own module.
        is_wrapper = _is_known(fn.__globals__.get("__name__"))
        names = frozenset[str]() if is_wrapper else names_in(fn.__code__)
        self._named |= names
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        places = [(name, functools.partial(_content, cell)) for name, cell in cells]
        for name in sorted(names & fn.__globals__.keys()):
            places.append((name, functools.partial(fn.__globals__.get, name, _MISSING)))
        self.found += places
        yield from ((name, get()) for name, get in places)
        defaults = (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
        yield from self._constants(f"a default of {fn.__qualname__}", defaults)
        yield from self._attributes(label, vars(fn))

    def _constants(self, label: str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        """Yields values that always are the same objects; what they hold may change."""
        for value in values:
            self.found.append((label, functools.partial(_same, value)))
            yield label, value

    def _attributes(
        self, label: str, table: Any, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, Any]]:
        for name in sorted(self._named.intersection(table if names is None else names)):
            self.found.append((f"{label}.{name}", functools.partial(table.get, name, _MISSING)))
            yield f"{label}.{name}", table.get(name)

    def _of_class(self, label: str, cls: type) -> Iterator[tuple[str, Any]]:
        for one in cls.__mro__:
            if not _is_known(one.__module__):
                table = vars(one)
                yield from self._attributes(label, table, table.keys() - _NOT_IN_STEPS)
                # Python calls these without their names.
                special = (
                    value
                    for name, value in table.items()
                    if name.startswith("__") and name not in _NOT_IN_STEPS
                )
                yield from ((label, one) for one in special if isinstance(one, types.FunctionType))

    def _of_module(self, label: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for one in module.modules():
            own = raw(one)
            if id(one) not in self._known:
                held = filter(None, (own["_parameters"], own["_buffers"]))
                name = f"the attributes of {type(one).__name__}"
                self.tables += [(name, table) for table in (own, *held)]
            cls = plain_class(type(one))
            yield from self._of_class(cls.__name__, cls)
            for name in _HOOKS:
                yield from ((f"a hook of {label}", hook) for hook in own[name].values())
            for name in self._named.intersection(own):
                yield f"{label}.{name}", own[name]
        for parameter in module.parameters():
            yield label, parameter
            for name in _HOOKS_OF_TENSORS:
                hooks = getattr(parameter, name, None) or {}
                yield from ((f"a hook of {label}", hook) for hook in hooks.values())

    def _of_optimizer(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        # Their own steps happen in Python, so only what the step itself reads counts.
        own = vars(value)
        yield from self._attributes(label, own, own.keys() - {"param_groups", "step"})
        if "param_groups" in self._named and isinstance(value, Optimizer):
            for place, group in enumerate(groups_of(value)):
                for key in sorted(self._named.intersection(group) - {"params"}):
                    get = functools.partial(_setting, value, place, key)
                    self.found.append((f"{label}.param_groups", get))
        read = {f"{label}.{name}" for name in _SCHEDULED}
        self.scheduled.update(name for name, _ in self.found if name in read)

    def _of_object(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        cls = plain_class(type(value))
        own = getattr(value, "__dict__", None)
        is_iterator = hasattr(cls, "__next__") and not isinstance(own, dict)
        if isinstance(value, _QUEUES) or (is_iterator and not hasattr(cls, "write")):
            self.iterator = self.iterator or label
        if isinstance(own, dict) and "__wrapped__" in own:
            # A function with a cache, for example.
            yield label, own["__wrapped__"]
        if cls.__module__.partition(".")[0] in _PACKAGES:
            return
        if isinstance(own, dict):
            self.found.append((f"the attributes of {label}", functools.partial(len, own)))
            yield from self._attributes(label, own)
        for name in sorted(self._named & _slots_of(cls)):
            get = functools.partial(getattr, value, name, _MISSING)
            self.found.append((f"{label}.{name}", get))
            yield f"{label}.{name}", get()
        yield from self._of_class(label, cls)


def _is_short(container: Any) -> bool:
    """Whether the content of a container is looked at."""
    return len(container) <= _MOST_ENTRIES


@functools.cache
def _is_known(module: str | None) -> bool:
    """Whether a module is one of Python or of an installed package, and not of the program.

    What these change for themselves, such as counters and caches, would look like a change of
    the program.
    """
    package = (module or "").partition(".")[0]
    if package in _PACKAGES or (package in sys.stdlib_module_names and package != "__main__"):
        return True
    found = sys.modules.get(package)
    folders = (
        *getattr(found, "__path__", ()),
        os.path.dirname(getattr(found, "__file__", "") or ""),
    )
    return any(not _INSTALLED.isdisjoint(folder.split(os.sep)) for folder in folders)


def _slots_of(cls: type) -> frozenset[str]:
    """Returns the attributes that objects of a class keep outside of their `__dict__`."""
    pairs = ((name, value) for one in cls.__mro__ for name, value in vars(one).items())
    return frozenset(name for name, value in pairs if type(value) is types.MemberDescriptorType)


def _setting(optimizer: Optimizer, place: int, key: str) -> Any:
    groups = groups_of(optimizer)
    return groups[place].get(key, _MISSING) if place < len(groups) else _MISSING


def _same(value: Any) -> Any:
    return value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING  # It has none yet.


class Surroundings(State):
    """The variables and attributes that a step, and the functions that it calls, may use."""

    def __init__(
        self, fn: Callable[..., Any], modules: Callable[[], Sequence[nn.Module]] = list
    ) -> None:
        super().__init__()
        # Those of the strategy, which knows their attributes.
        self._modules = modules
        self._roots = [(getattr(fn, "__qualname__", "the step"), fn)]
        # The names in the code of the step and its functions.
        self._in_code: set[str] = set()
        # What Python changes in calls that it makes at every replay, too.
        self._changing: set[str] = set()
        self._getters: list[Callable[[], Any]] = []
        self._found: list[Any] = []
        # Tensors among these, and their shapes.
        self._tensors: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self.generators: list[Any] = []
        self.scheduled: set[str] = set()
        self.iterator = ""
        self._note()

    def take(self, objects: Sequence[Any], named: set[str]) -> None:
        """Looks at other objects, too, such as arguments, and at other attributes."""
        if not objects and named <= self._in_code:
            return
        known = {id(one) for _, one in self._roots}
        new = [("an argument", one) for one in objects if id(one) not in known]
        if new or not named <= self._in_code:
            self._roots += new
            self._in_code |= named
            self._note()

    def allow_changes(self) -> None:
        """After a call that Python makes at every replay, too: what it has changed may change."""
        while name := self.changed():
            self._changing.add(name)
            self._note()

    def _is_current(self) -> bool:
        found = [get() for get in self._getters]
        if not all(map(operator.is_, found, self._found)):
            # Equal numbers and strings need not be the same objects.
            if list(map(constant, found)) != list(map(constant, self._found)):
                return False
            self._found = found
        return self._contents.are_same() and [one.shape for one in self._tensors] == self._shapes

    def _note(self) -> None:
        seen = Places(self._roots, self._in_code, self._modules())
        self.generators, self.iterator = seen.generators, seen.iterator
        self.scheduled = seen.scheduled
        places = [one for one in seen.found if one[0] not in self._changing]
        held, tables = (
            [one for one in some if one[0] not in self._changing]
            for some in (seen.containers, seen.tables)
        )
        self._getters = [get for _, get in places]
        self._found = [get() for get in self._getters]
        self._tensors = [one for one in self._found if isinstance(one, Tensor)]
        self._shapes = [one.shape for one in self._tensors]
        self._contents.note([one for _, one in (*held, *tables)])
        values = (*map(_noted, self._found), *(_plain(table) for _, table in tables))
        # An object and its class may have attributes of one name.
        self._named = {}
        for (name, _), value in zip((*places, *tables), values, strict=True):
            self._named.setdefault(name, []).append(value)
        self._take(values)


def _noted(value: Any) -> Hashable:
    if isinstance(value, CONTAINERS) and _is_short(value):
        return frozen(value)
    return (constant(value), value.shape) if isinstance(value, Tensor) else constant(value)


def _plain(table: dict[Any, Any]) -> Hashable:
    return frozen({name: one for name, one in table.items() if name not in TORCH_TABLES})
