"""Where the running code is: outside, in a strategy's scope, or on one of its replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.contexts.replica import CrossReplicaContext, ReplicaContext
from unisono.contexts.stack import current_context, is_default, stack
from unisono.values import set_replica_seen

if TYPE_CHECKING:
    from unisono.strategies import Strategy


def current_replica() -> ReplicaContext | None:
    """Returns the replica of a strategy that this thread is running, if it is."""
    entered = stack.entered
    if entered and isinstance(entered[-1], ReplicaContext):
        return entered[-1]
    return None


def _replica_seen() -> int | None:
    entered = stack.entered
    if not entered:
        return None
    context = entered[-1]
    if isinstance(context, ReplicaContext):
        return context.local_id
    return context.replica_id


set_replica_seen(_replica_seen)


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
    return not is_default(current_context().strategy)


def running_replica() -> ReplicaContext | None:
    """Returns the replica that this thread runs, in whatever context it is now."""
    replicas = (one for one in reversed(stack.entered) if isinstance(one, ReplicaContext))
    return next(replicas, None)


def is_inside_run() -> bool:
    """Whether this thread runs a replica, in whatever context it is now."""
    return running_replica() is not None


def other_strategy(strategy: Any) -> Strategy | None:
    """Returns the strategy that this thread is under, if it is another than `strategy`."""
    entered = stack.entered
    if entered and entered[-1].strategy is not strategy:
        return entered[-1].strategy
    return None
