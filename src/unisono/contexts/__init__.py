"""Where the running code is, and what it can do there."""

from unisono.contexts.current import (
    Context,
    CrossReplicaContext,
    Meeting,
    ReplicaContext,
    current_context,
    current_replica,
    entered,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    is_default,
    is_inside_run,
    other_strategy,
    running_replica,
    set_outside,
)
from unisono.contexts.replicas import Replicas

__all__ = [
    "Context",
    "CrossReplicaContext",
    "Meeting",
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
    "is_inside_run",
    "other_strategy",
    "running_replica",
    "set_outside",
]
