"""Where the running code is, in the words of TensorFlow 1.12 to 1.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.contexts import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
)
from unisono.devices import Device
from unisono.errors import ContextError
from unisono.options import ReduceOp

if TYPE_CHECKING:
    from unisono.strategies import Strategy


class TowerContext:
    """The context of a replica as TensorFlow 1.12 had it: `get_tower_context()` returns one.

    Args:
        context: The context as it is today.
    """

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    @property
    def tower_id(self) -> int:
        """The number of the replica among those of all workers, from 0."""
        return self._context.replica_id_in_sync_group

    @property
    def distribution_strategy(self) -> Strategy:
        """The strategy whose replica it is."""
        return self._context.strategy

    @property
    def num_towers(self) -> int:
        """The number of replicas that are kept in sync, on all workers."""
        return self._context.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one replica."""
        return self._context.num_replicas_in_sync == 1

    @property
    def device(self) -> Device:
        """The device of this replica."""
        return self._context.device

    def merge_call(self, merge_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Waits until every replica makes a `merge_call`, then calls `merge_fn` once.

        See `ReplicaContext.merge_call`, which takes `args` and `kwargs` as a tuple and a dict.

        Args:
            merge_fn: Called as `merge_fn(strategy, *args, **kwargs)`.
            *args: Its arguments, of this replica.
            **kwargs: Its keyword arguments, of this replica.

        Returns:
            This replica's components of what `merge_fn` returns.
        """
        return self._context.merge_call(merge_fn, args, kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TowerContext) and other._context is self._context

    def __hash__(self) -> int:
        return hash(self._context)


def get_tower_context() -> TowerContext | None:
    """Returns the current replica's context, or None in a cross-replica context."""
    context = get_replica_context()
    return None if context is None else TowerContext(context)


def get_cross_replica_context() -> Strategy | None:
    """Returns the current strategy in a cross-replica context, or None on a replica."""
    return get_strategy() if in_cross_replica_context() else None


def require_replica_context(replica_ctx: ReplicaContext | TowerContext) -> None:
    """Raises unless the running code is on the replica of `replica_ctx`.

    Args:
        replica_ctx: What `get_replica_context()` or `get_tower_context()` returned.

    Raises:
        ContextError: If it is not.
    """
    context = replica_ctx._context if isinstance(replica_ctx, TowerContext) else replica_ctx
    if get_replica_context() is not context:
        raise ContextError(
            f"This code does not run on replica {context.replica_id_in_sync_group} of "
            f"{context.strategy!r}. Call it in the function that you pass to `run`."
        )


def get_loss_reduction() -> ReduceOp:
    """Returns how the current strategy aggregates gradients: its `reduce_gradients`."""
    return get_strategy().extended.reduce_gradients
