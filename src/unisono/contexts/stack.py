"""The contexts that a thread has entered, one within another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from unisono.contexts.replica import CrossReplicaContext, ReplicaContext

Context: TypeAlias = "ReplicaContext | CrossReplicaContext"


class _Stack(threading.local):
    """The contexts that the current thread has entered."""

    def __init__(self) -> None:
        self.entered: list[Context] = []


stack = _Stack()
# Outside every scope code counts as the one replica of the default strategy, which adds itself.
_outside: list[ReplicaContext] = []


def set_outside(context: ReplicaContext) -> None:
    """Says what context code is in that has entered none."""
    _outside[:] = [context]


def is_default(strategy: Any) -> bool:
    """Whether `strategy` is that of code that has entered no other."""
    return strategy is _outside[0].strategy


def current_context() -> Context:
    """Returns the innermost context of this thread."""
    entered = stack.entered
    return entered[-1] if entered else _outside[0]


class entered:
    """Puts the running code into `context` until the block ends.

    A class and not a generator: a replica may be stopped at any instruction, and a generator that
    was not left properly would be ended later, by another thread.
    """

    __slots__ = ("_context", "_depth")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._depth = 0

    def __enter__(self) -> None:
        self._depth = len(stack.entered)
        stack.entered.append(self._context)

    def __exit__(self, *error: object) -> None:
        del stack.entered[self._depth :]
