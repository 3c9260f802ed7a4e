"""Subclasses that objects have while replicas run."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from unisono.sharing import computed_once

_PLAIN_CLASS = "_unisono_plain_class"
_set_class: Callable[[Any, type], None] = object.__dict__["__class__"].__set__


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
        self._added: dict[int, tuple[weakref.ref[Any], type]] = {}
        # The objects of the current run, their classes, and those that they have during the run.
        self._present: list[Any] = []
        self._plain: list[type] = []
        self._during: list[type] = []
        self._is_up = False

    def add(self, target: Any, before: type, *, is_at_once: bool = False) -> None:
        """Lets `before` come before the class of an object in the next run, or in this one, too."""
        cls: Any = type(target)
        with self._lock:
            known = self._added.get(id(target))
            if known is not None and known[0]() is target:
                return
            self._added[id(target)] = (weakref.ref(target), before)
            if is_at_once and self._is_up:
                self._present = [*self._present, target]
                self._plain = [*self._plain, cls]
                self._during = [*self._during, in_front(before, cls)]
                set_classes([target], self._during[-1:])

    def targets(self, before: type) -> list[Any]:
        """Returns the objects whose class this one, or a class of it, comes before."""
        with self._lock:
            added = list(self._added.values())
        found = [target() for target, cls in added if issubclass(cls, before)]
        return [target for target in found if target is not None]

    def put_up(self) -> None:
        """Before a run: gives every object its other class."""
        with self._lock:
            added = self._added.items()
            found = {key: (target, one) for key, one in added if (target := one[0]()) is not None}
            if len(found) < len(added):
                self._added = {key: one for key, (_, one) in found.items()}
            present = [target for target, _ in found.values()]
            plain = list(map(type, present))
            if plain != self._plain:
                earlier = (before for _, (_, before) in found.values())
                self._during = list(map(in_front, earlier, plain))
                self._plain = plain
            self._present = present
            self._is_up = True
            set_classes(present, self._during)

    def take_down(self) -> None:
        """After a run: restores the class of every object. Calling it again does nothing."""
        if not self._is_up:
            return
        with self._lock:
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
