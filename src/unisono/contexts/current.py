"""Where the running code is: outside, in a strategy's scope, or on one of its replicas."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias

from unisono.contexts.replica import CrossReplicaContext, ReplicaContext
from unisono.values import set_replica_seen

if TYPE_CHECKING:
    from unisono.strategies import Strategy

Context: TypeAlias = "ReplicaContext | CrossReplicaContext"


class _Stack(threading.local):
    """The contexts that the current thread has entered."""

    def __init__(self) -> None:
        self.entered: list[Context] = []


_stack = _Stack()
# Outside every scope code counts as the one replica of the default strategy, which adds itself.
_outside: list[ReplicaContext] = []


def set_outside(context: ReplicaContext) -> None:
    """Says what context code is in that has entered none."""
    _outside[:] = [context]


def current_context() -> Context:
    """Returns the innermost context of this thread."""
    entered = _stack.entered
    return entered[-1] if entered else _outside[0]


def current_replica() -> ReplicaContext | None:
    """Returns the replica of a strategy that this thread is running, if it is."""
    entered = _stack.entered
    if entered and isinstance(entered[-1], ReplicaContext):
        return entered[-1]
    return None


def _replica_seen() -> int | None:
    entered = _stack.entered
    if not entered:
        return None
    context = entered[-1]
    if isinstance(context, ReplicaContext):
        return context.local_id
    return context.replica_id


set_replica_seen(_replica_seen)


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
        self._depth = len(_stack.entered)
        _stack.entered.append(self._context)

    def __exit__(self, *error: object) -> None:
        del _stack.entered[self._depth :]


def get_replica_context() -> ReplicaContext | None:
    """Returns the current replica's context, or None in a cross-replica context.

    Outside every scope it is the context of the default strategy, which has one replica.
    """
    context = current_context()
    return context if isinstance(context, ReplicaContext) else None


def in_cross_replica_context() -> bool:
    """Whether the code runs for all replicas: in a scope, or in a `merge_call`."""
    return isinstance(current_context(), CrossReplicaContext)


def get_strategy() -> Strategy:
    """Returns the strategy of the current context; outside every scope, the default one."""
    return current_context().strategy


def has_strategy() -> bool:
    """Whether the code runs under a strategy other than the default one."""
    return bool(_stack.entered)


def is_inside_run() -> bool:
    """Whether this thread runs a replica, in whatever context it is now."""
    return any(isinstance(context, ReplicaContext) for context in _stack.entered)


def other_strategy(strategy: Any) -> Strategy | None:
    """Returns the strategy that this thread is under, if it is another than `strategy`."""
    entered = _stack.entered
    if entered and entered[-1].strategy is not strategy:
        return entered[-1].strategy
    return None
