"""What all threads of a process share, with and without the interpreter lock.

A single operation on a dict, list or set is atomic in both cases. Code that checks first and writes
later is not, nor is a loop over a container that other threads change.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class LiveSet(Generic[T]):
    """A set of weak references that any thread may add to while others iterate over it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Never changed, only replaced.
        self._refs: tuple[weakref.ref[T], ...] = ()

    def add(self, one: T) -> None:
        """Adds an object, for as long as it lives."""
        with self._lock:
            self._refs = (*self._others(one), weakref.ref(one))

    def discard(self, one: T) -> None:
        """Removes an object, if it is there."""
        with self._lock:
            self._refs = tuple(self._others(one))

    def newest(self) -> T | None:
        """Returns the object that was added last, of those that are alive."""
        return next(reversed(list(self)), None)

    def __iter__(self) -> Iterator[T]:
        """Iterates over the objects that are alive now."""
        return iter([one for ref in self._refs if (one := ref()) is not None])

    def _others(self, one: T) -> Iterator[weakref.ref[T]]:
        return (ref for ref in self._refs if (held := ref()) is not None and held is not one)


def in_place_of(owner: Any, name: str) -> Callable[[F], F]:
    """Puts a function in the place of one of torch, for all threads, with its documentation."""

    def put(made: F) -> F:
        setattr(owner, name, functools.wraps(getattr(owner, name))(made))
        return made

    return put


def names_of(package: str, *modules: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package: its names in modules that few programs load."""

    def find(name: str) -> Any:
        for module in modules if name in sys.modules[package].__all__ else ():
            found = importlib.import_module(f"{package}.{module}")
            if hasattr(found, name):
                return getattr(found, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def computed_once(fn: Callable[..., T]) -> Callable[..., T]:
    """Makes `fn` run once for each set of arguments. Threads that come meanwhile wait for it.

    `functools.cache` runs a function twice if two threads call it at the same time. That is wrong
    for functions that patch torch, or that make a class.
    """
    lock = threading.RLock()
    results: dict[tuple[Any, ...], T] = {}

    @functools.wraps(fn)
    def call(*args: Any) -> T:
        if args not in results:
            with lock:
                if args not in results:
                    results[args] = fn(*args)
        return results[args]

    return call
