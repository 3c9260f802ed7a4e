"""Where the running code is, and what it can do there."""

from unisono.contexts.current import (
    CrossReplicaContext,
    ReplicaContext,
    Replicas,
    current_context,
    current_replica,
    entered,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    is_default,
    other_strategy,
    running_replica,
    runs_once,
    set_outside,
)

__all__ = [
    "CrossReplicaContext",
    "ReplicaContext",
    "Replicas",
    "current_context",
    "current_replica",
    "entered",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_default",
    "other_strategy",
    "running_replica",
    "runs_once",
    "set_outside",
]
