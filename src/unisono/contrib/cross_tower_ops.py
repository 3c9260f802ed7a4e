"""The operations and values as they were spelled when a replica was a tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.arguments import check_instance
from unisono.contrib.cross_device_ops import (
    AllReduceCrossDeviceOps,
    ContribOps,
    DelegatingOps,
    InStrategy,
    ReductionToOneDeviceCrossDeviceOps,
    is_overridden,
    names_of,
)
from unisono.devices import DeviceLike, resolve
from unisono.errors import DeviceError, UnsupportedError
from unisono.options import ReduceOp, VariableAggregation
from unisono.reductions import (
    CrossDeviceOps,
    always_mirrored,
    listed_destinations,
    listed_pairs,
)
from unisono.values import DistributedValues, Mirrored, PerReplica


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


_REDUCE_OPS = {
    VariableAggregation.SUM: ReduceOp.SUM,
    VariableAggregation.MEAN: ReduceOp.MEAN,
}
_AGGREGATIONS = {op: aggregation for aggregation, op in _REDUCE_OPS.items()}
_HOOKS = ("reduce", "batch_reduce", "broadcast", "_reduce", "_batch_reduce", "_broadcast")


class CrossTowerOps(ContribOps):
    """The base of cross-tower reductions: `aggregation` for the operation, `PerDevice` values.

    A subclass overrides `reduce`, `batch_reduce` and `broadcast`; or the methods that do their work
    in TensorFlow 1.12, `_reduce`, `_batch_reduce` and `_broadcast`, which have the same arguments
    and are given values as `PerDevice` and destinations as lists of device names; or
    `reduce_implementation`, as a subclass of `unisono.CrossDeviceOps` does. A strategy calls
    whichever it overrides. Without a method for batches, values are reduced one by one.
    """

    _ONE = ("reduce", "_reduce")
    _BATCH = ("batch_reduce", "_batch_reduce", "batch_reduce_implementation")

    def in_strategy(self) -> CrossDeviceOps:
        is_changed = is_overridden(self, *_HOOKS) or not isinstance(self, DelegatingOps)
        return TowersInStrategy(self) if is_changed else super().in_strategy()

    def reduce(  # type: ignore[override]
        self, aggregation: VariableAggregation, per_device_value: Any, destinations: Any
    ) -> Mirrored:
        """Combines the values of a `PerDevice` and puts the result on the destinations.

        Args:
            aggregation: How: `VariableAggregation.SUM` or `MEAN`.
            per_device_value: A `PerDevice` or another distributed value; or a tensor, which counts
                as the value of a single device.
            destinations: Where the result goes: as for `CrossDeviceOps.reduce`, or a list of
                device names.

        Returns:
            A `Mirrored`, also for one device.

        Raises:
            ValueError: If `aggregation` is neither SUM nor MEAN, or the value cannot be reduced.
        """
        _reduce_op(aggregation)
        targets = listed_destinations(destinations)
        value = _per_device(per_device_value)
        return always_mirrored(self._reduce(aggregation, value, names_of(targets)), targets)

    def batch_reduce(  # type: ignore[override]
        self, aggregation: VariableAggregation, value_destination_pairs: Any
    ) -> list[Mirrored]:
        """Reduces many values, as `reduce` does each.

        Args:
            aggregation: How: `VariableAggregation.SUM` or `MEAN`.
            value_destination_pairs: Tuples of a value and its destinations.

        Returns:
            A list of `Mirrored`, in the order of the pairs.
        """
        _reduce_op(aggregation)
        pairs = [
            (_per_device(value), names_of(listed_destinations(to)))
            for value, to in listed_pairs(value_destination_pairs)
        ]
        return list(self._batch_reduce(aggregation, pairs))

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copies a tensor to the destinations.

        Args:
            tensor: A tensor, or anything that can be read as one.
            destinations: Where the copies go; see `reduce`.

        Returns:
            A `Mirrored`, also for one device.
        """
        targets = listed_destinations(destinations)
        return always_mirrored(self._broadcast(tensor, names_of(targets)), targets)

    def _reduce(
        self, aggregation: VariableAggregation, per_device_value: PerDevice, destinations: list[str]
    ) -> Mirrored:
        return super().reduce(_reduce_op(aggregation), per_device_value, destinations)

    def _batch_reduce(
        self,
        aggregation: VariableAggregation,
        value_destination_pairs: list[tuple[PerDevice, list[str]]],
    ) -> list[Mirrored]:
        if is_overridden(self, *self._ONE) and not isinstance(self, DelegatingOps):
            return [self.reduce(aggregation, value, to) for value, to in value_destination_pairs]
        return super().batch_reduce(_reduce_op(aggregation), value_destination_pairs)

    def _broadcast(self, tensor: Any, destinations: list[str]) -> Mirrored:
        return super().broadcast(tensor, destinations)


class TowersInStrategy(InStrategy):
    """Lets a strategy reduce with `CrossTowerOps`, which it calls as TensorFlow 1.12 did."""

    def _op(self, op: ReduceOp) -> VariableAggregation:
        return _aggregation(op)

    def _value(self, value: DistributedValues) -> DistributedValues:
        return _per_device(value)  # type: ignore[no-any-return]


class AllReduceCrossTowerOps(CrossTowerOps, AllReduceCrossDeviceOps):
    """`AllReduceCrossDeviceOps` in the spelling of `CrossTowerOps`."""


class ReductionToOneDeviceCrossTowerOps(CrossTowerOps, ReductionToOneDeviceCrossDeviceOps):
    """`ReductionToOneDevice` in the spelling of `CrossTowerOps`."""


def _per_device(value: Any) -> Any:
    """Returns a distributed value as a `PerDevice`; anything else is the value of one device."""
    if isinstance(value, DistributedValues) and not isinstance(value, PerDevice):
        return PerDevice.placed(value.values, value.devices)
    return value


def _reduce_op(aggregation: VariableAggregation) -> ReduceOp:
    if not isinstance(aggregation, VariableAggregation) or aggregation not in _REDUCE_OPS:
        known = " or ".join(map(str, _REDUCE_OPS))
        raise UnsupportedError(f"`aggregation` must be {known}, got {aggregation!r}.")
    return _REDUCE_OPS[aggregation]


def _aggregation(op: ReduceOp) -> VariableAggregation:
    if op not in _AGGREGATIONS:
        known = " and ".join(map(str, _AGGREGATIONS))
        raise UnsupportedError(
            f"`CrossTowerOps` support {known}, not {op}. Use `CrossDeviceOps` instead."
        )
    return _AGGREGATIONS[op]
