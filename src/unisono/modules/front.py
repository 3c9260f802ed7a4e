"""Clones of modules, and subclasses that objects have while replicas run.

In the thread of a replica, a module is the clone of that replica, and its parameters are leaves of
the replica. A parameter that the step kept from before the run, such as a variable of a closure, is
the primary itself. While replicas run, primaries therefore have a subclass of their class, whose
functions use the leaf instead. Leaves have the class of torch, so nothing is slower where a step
uses a module.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn
from torch.optim import optimizer

from unisono.contexts import current_replica
from unisono.errors import ContextError
from unisono.modules.leaves import Leaves
from unisono.modules.owners import owner_of
from unisono.sharing import computed_once
from unisono.torch_private import no_torch_function_of_subclasses

T = TypeVar("T")

_PLAIN_CLASS = "_unisono_plain_class"
_set_class: Callable[[Any, type], None] = object.__dict__["__class__"].__set__


@dataclass(eq=False)
class Mirror:
    """What a strategy knows about a primary module."""

    primary: weakref.ref[nn.Module]
    replicas: list[nn.Module] = field(default_factory=list)
    # By name, the attributes of the primary that the clones have, and what replica 0 sees there.
    given: dict[str, tuple[int, Any]] = field(default_factory=dict)


class Front:
    """Comes before a user's class. Copies, pickles and new objects are of the user's class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps `__init_subclass__` of the user's class, such as a registry, from being called."""

    @property
    def __class__(self) -> Any:
        """The user's class: what is asked of an object by its users."""
        return plain_class(type(self))

    @__class__.setter
    def __class__(self, cls: type) -> None:
        before = type(self).__mro__[1]
        _set_class(self, in_front(before, plain_class(cls)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns what the user's class returns, without a trace of the class before it."""
        reduced: Any = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        rebuild, args, *rest = reduced
        plain = (plain_class(arg) if isinstance(arg, type) else arg for arg in args)
        return (rebuild, tuple(plain), *rest)


@computed_once
def in_front(before: type, cls: type) -> type:
    """Returns a subclass of `cls`, with the same name, whose methods are first those of `before`.

    Its only base is `cls`, so that objects can change between the two, whatever the layout of the
    bases of `cls` is. Neither the metaclass of `cls` nor `__init_subclass__` hears of it.
    """
    first = before.__mro__[:-1]
    metaclass = type(
        type(cls).__name__, (type(cls),), {"mro": lambda made: [made, *first, *cls.__mro__]}
    )
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__slots__": (),
        "__new__": lambda _, *args, **kwargs: cls(*args, **kwargs),
        _PLAIN_CLASS: cls,
    }
    made: type = type.__new__(metaclass, cls.__name__, (cls,), namespace)
    return made


def plain_class(cls: type) -> Any:
    """Returns the user's class of an object, whether replicas run or not."""
    return vars(cls).get(_PLAIN_CLASS, cls)


class Fronts:
    """The objects of one strategy that have another class while its replicas run."""

    def __init__(self) -> None:
        # Replicas and other threads may add objects at the same time.
        self._lock = threading.Lock()
        # By identity, in the order of adding.
        self.added: dict[int, tuple[weakref.ref[Any], type]] = {}
        # The objects of the current run, their classes, and those that they have during the run.
        self._present: list[Any] = []
        self._plain: list[type] = []
        self._during: list[type] = []
        # The parameters of the current run.
        self._captured: list[nn.Parameter] = []
        self._is_up = False

    def add(self, target: Any, before: type, *, is_at_once: bool = False) -> None:
        """Lets `before` come before the class of an object in the next run, or in this one, too."""
        cls: Any = type(target)
        with self._lock:
            known = self.added.get(id(target))
            if known is not None and known[0]() is target:
                return
            self.added[id(target)] = (weakref.ref(target), before)
            if is_at_once and self._is_up:
                self._present = [*self._present, target]
                self._plain = [*self._plain, cls]
                self._during = [*self._during, in_front(before, cls)]
                set_classes([target], self._during[-1:])

    def of_kind(self, kind: type[T]) -> list[T]:
        """Returns the objects of a class."""
        with self._lock:
            added = list(self.added.values())
        found = (target() for target, _ in added)
        return [target for target in found if isinstance(target, kind)]

    def up_during(self, run: Callable[[], T], leaves: Iterable[Leaves] = ()) -> T:
        """Makes a run in which objects, and the parameters of `leaves`, have their other class."""
        try:
            try:
                self.put_up()
                self.capture(leaves)
                return run()
            finally:
                self.take_down()
        finally:
            # Again, because Ctrl-C may have ended the first one halfway.
            self.take_down()

    def put_up(self) -> None:
        """Before a run: gives every object its other class."""
        with self._lock:
            added = self.added
            found = {
                key: target for key, (ref, _) in added.items() if (target := ref()) is not None
            }
            for key in added.keys() - found.keys():
                del added[key]
            present = list(found.values())
            plain = list(map(type, present))
            if plain != self._plain:
                self._during = list(map(in_front, (one for _, one in added.values()), plain))
                self._plain = plain
            self._present = present
            self._is_up = True
            set_classes(present, self._during)

    def capture(self, leaves: Iterable[Leaves]) -> None:
        """In a run: gives primary parameters their other class."""
        if self._is_up:
            # The primary of a variable is itself the leaf of the first replica.
            new = [
                one.primary
                for one in leaves
                if type(one.primary) is nn.Parameter and one.leaves[0] is not one.primary
            ]
            self._captured += new
            set_classes(new, itertools.repeat(Captured))

    def take_down(self) -> None:
        """After a run: restores the class of every object. Calling it again does nothing."""
        if not self._is_up:
            return
        with self._lock:
            set_classes(self._captured, itertools.repeat(nn.Parameter))
            self._captured = []
            present, plain = self._present, self._plain
            if list(map(type, present)) != self._during[: len(present)]:
                # In the run, an object was given another class, such as that of a parametrization.
                plain = [plain_class(type(one)) for one in present]
            set_classes(present, plain)
            self._present = []
            self._is_up = False

    def take_down_in_child(self) -> None:
        """Does the same in a forked child. A thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self.take_down()


def set_classes(targets: Iterable[Any], classes: Iterable[type]) -> None:
    """Gives each object the class that stands in its place."""
    # One loop in C, which Ctrl-C cannot interrupt halfway.
    collections.deque(map(_set_class, targets, classes), maxlen=0)


class Redirect(Front):
    """Comes before the user's class in a primary module for as long as replicas run.

    In the thread of a replica, every attribute is that of the replica's clone: parameters,
    submodules, methods and `forward`, also through references that were kept before the run.
    Clones have the user's own class, so nothing is slower inside them. In other threads, and
    where code runs once for all replicas, the module is itself.
    """

    @staticmethod
    def _unisono_other(module: Any) -> Any:
        return _clone(module)

    def __getattribute__(self, name: str) -> Any:
        other = type(self)._unisono_other(self)
        return super().__getattribute__(name) if other is None else getattr(other, name)

    def __setattr__(self, name: str, value: Any) -> None:
        other = type(self)._unisono_other(self)
        if other is None:
            super().__setattr__(name, value)
        else:
            setattr(other, name, value)

    def __delattr__(self, name: str) -> None:
        other = type(self)._unisono_other(self)
        if other is None:
            super().__delattr__(name)
        else:
            delattr(other, name)


class OfProgram(Redirect):
    """Comes before the class of a replica's clone where code runs once for all replicas.

    That code may have the clone from its replica: as `self` of a method, in a closure or in a
    partial. There, every attribute is that of the program's module.
    """

    @staticmethod
    def _unisono_other(clone: Any) -> Any:
        return None if current_replica() is not None else _originals.get(id(clone))


# By the identity of a clone, while code runs once for all replicas.
_originals: dict[int, nn.Module] = {}


class as_of_program:
    """Until the block ends, clones of a replica are the program's modules outside replicas."""

    __slots__ = ("_clones", "_modules")

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        found = list(pairs)
        self._modules = [module for module, _ in found]
        self._clones = [clone for _, clone in found]

    def __enter__(self) -> None:
        _originals.update(zip(map(id, self._clones), self._modules, strict=True))
        self._set_classes(functools.partial(in_front, OfProgram))

    def __exit__(self, *error: object) -> None:
        self._set_classes(plain_class)
        for clone in self._clones:
            del _originals[id(clone)]

    def _set_classes(self, class_for: Callable[[type], type]) -> None:
        # There may be many modules, but of few classes.
        now = list(map(type, self._clones))
        classes = {cls: class_for(cls) for cls in set(now)}
        set_classes(self._clones, map(classes.__getitem__, now))


def _clone(module: Any) -> Any:
    context = current_replica()
    if context is None:
        return None
    mirror = context.replicas.mirrors.mirrors.get(id(module))
    if mirror is not None:
        return mirror.replicas[context.local_id]
    if owner_of(module) is not None:
        raise ContextError(
            f"This {type(module).__name__} belongs to another strategy than {context.strategy!r}, "
            "so its replicas would share the parameters. Make it in the scope of the strategy that "
            "runs the step."
        )
    return None


class Captured(nn.Parameter):
    """The class of primary parameters while replicas run."""

    __slots__ = ()

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Makes a plain parameter, because a copy is not a primary."""
        return nn.Parameter(data, requires_grad)

    # What it has outside a run.
    __class__ = property(lambda _: nn.Parameter)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function with the leaves of the replica; outside a replica, as it is."""
        kwargs = kwargs or {}
        context = current_replica()
        if context is not None:
            owners = context.replicas.mirrors.owners
            try:
                args, kwargs = _with_leaves((args, kwargs), owners, context.local_id)
            except KeyError:
                # A parameter of another strategy has no leaf here.
                pass
            else:
                return func(*args, **kwargs)
        with no_torch_function_of_subclasses():
            return func(*args, **kwargs)


def _with_leaves(value: Any, owners: dict[int, Leaves], replica_id: int) -> Any:
    kind = type(value)
    if kind is Captured:
        return owners[id(value)].leaves[replica_id]
    if kind is tuple or kind is list:
        return kind(_with_leaves(one, owners, replica_id) for one in value)
    if kind is dict:
        return {name: _with_leaves(one, owners, replica_id) for name, one in value.items()}
    return value


# Optimizers update many parameters at once only if they know their class.
optimizer._foreach_supported_types.append(Captured)
