"""What TensorFlow 1.12 had when a replica was a tower: values, operations and contexts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from unisono.arguments import check_instance
from unisono.contexts import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
)
from unisono.contrib.cross_device_ops import (
    AllReduceCrossDeviceOps,
    ContribOps,
    ReductionToOneDeviceCrossDeviceOps,
    is_one_by_one,
    names_of,
)
from unisono.devices import Device, DeviceLike, resolve
from unisono.errors import ContextError, DeviceError, UnsupportedError
from unisono.options import ReduceOp, VariableAggregation
from unisono.reductions import always_mirrored, listed_destinations, listed_pairs
from unisono.values import DistributedValues, Mirrored, PerReplica

if TYPE_CHECKING:
    from unisono.strategies import Strategy


class PerDevice(PerReplica):
    """One value per device.

    Args:
        index: The values by device. Replica ids follow the order of the mapping.
    """

    __slots__ = ()

    def __init__(self, index: Mapping[DeviceLike, Any]) -> None:
        check_instance("index", index, Mapping, "a mapping from devices to values")
        super().__init__(index.values(), tuple(index))

    def get(self, device: DeviceLike | None = None) -> Any:
        """Returns the value on a device.

        Args:
            device: The device; on a replica, None means the device of that replica.

        Raises:
            DeviceError: If there is no value on it.
        """
        if device is None:
            return self.value()
        wanted = resolve(device)
        if wanted not in self.devices:
            here = ", ".join(map(str, self.devices))
            raise DeviceError(
                f"This `PerDevice` has values on {here}, but none on {wanted}. Ask for one of its "
                "devices."
            )
        return self.values[self.devices.index(wanted)]


_AGGREGATIONS = {
    aggregation.reduce_op: aggregation
    for aggregation in VariableAggregation
    if aggregation.reduce_op is not None
}


class CrossTowerOps(ContribOps):
    """The base of cross-tower reductions.

    `aggregation` is `VariableAggregation.SUM` or `MEAN`, values are `PerDevice`, destinations may
    be lists of device names, and each result is a `Mirrored`, also for one device.

    A subclass overrides `reduce`, `batch_reduce` and `broadcast`; or the methods that do their work
    in TensorFlow 1.12, `_reduce`, `_batch_reduce` and `_broadcast`, which have the same arguments
    and are given values as `PerDevice` and destinations as lists of device names; or
    `reduce_implementation`, as a subclass of `unisono.CrossDeviceOps` does. A strategy calls
    whichever it overrides. Without a method for batches, values are reduced one by one.
    """

    def _older_op(self, op: ReduceOp) -> VariableAggregation:
        if op not in _AGGREGATIONS:
            known = " and ".join(map(str, _AGGREGATIONS))
            raise UnsupportedError(
                f"`CrossTowerOps` support {known}, not {op}. Use `CrossDeviceOps` instead."
            )
        return _AGGREGATIONS[op]

    def _older_value(self, value: Any) -> Any:
        if isinstance(value, DistributedValues) and not isinstance(value, PerDevice):
            return PerDevice.placed(value.values, value.devices)
        return value

    def reduce(  # type: ignore[override]
        self, aggregation: VariableAggregation, per_device_value: Any, destinations: Any
    ) -> Mirrored:
        """Combines the values of a `PerDevice`, or what `CrossDeviceOps.reduce` takes besides.

        It puts the result of the `aggregation` of `per_device_value` on the `destinations`.

        Raises:
            ValueError: If `aggregation` is neither SUM nor MEAN, or the value cannot be reduced.
        """
        _reduce_op(aggregation)
        targets = listed_destinations(destinations)
        value = self._older_value(per_device_value)
        return always_mirrored(self._reduce(aggregation, value, names_of(targets)), targets)

    def batch_reduce(  # type: ignore[override]
        self, aggregation: VariableAggregation, value_destination_pairs: Any
    ) -> list[Mirrored]:
        """Returns what `reduce` makes of each of `value_destination_pairs` with `aggregation`."""
        _reduce_op(aggregation)
        pairs = [
            (self._older_value(value), names_of(listed_destinations(to)))
            for value, to in listed_pairs(value_destination_pairs)
        ]
        return list(self._batch_reduce(aggregation, pairs))

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copies a `tensor`, or what can be read as one, to the `destinations`."""
        targets = listed_destinations(destinations)
        return always_mirrored(self._broadcast(tensor, names_of(targets)), targets)

    def _reduce(self, aggregation: Any, per_device_value: Any, destinations: Any) -> Mirrored:
        return super().reduce(_reduce_op(aggregation), per_device_value, destinations)

    def _batch_reduce(self, aggregation: Any, value_destination_pairs: Any) -> list[Mirrored]:
        if is_one_by_one(self) and self._ops is None:
            return [self.reduce(aggregation, value, to) for value, to in value_destination_pairs]
        return super().batch_reduce(_reduce_op(aggregation), value_destination_pairs)

    def _broadcast(self, tensor: Any, destinations: list[str]) -> Mirrored:
        return super().broadcast(tensor, destinations)


class AllReduceCrossTowerOps(CrossTowerOps, AllReduceCrossDeviceOps):
    """`AllReduceCrossDeviceOps` in the spelling of `CrossTowerOps`."""


class ReductionToOneDeviceCrossTowerOps(CrossTowerOps, ReductionToOneDeviceCrossDeviceOps):
    """`ReductionToOneDevice` in the spelling of `CrossTowerOps`."""


def _reduce_op(aggregation: VariableAggregation) -> ReduceOp:
    op = aggregation.reduce_op if isinstance(aggregation, VariableAggregation) else None
    if op is None:
        known = " or ".join(map(str, _AGGREGATIONS.values()))
        raise UnsupportedError(f"`aggregation` must be {known}, got {aggregation!r}.")
    return op


class TowerContext:
    """The context of a replica as TensorFlow 1.12 had it: `get_tower_context()` returns one."""

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
        """See `ReplicaContext.merge_call`, which gets `args` and `kwargs` as a tuple and a dict."""
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
