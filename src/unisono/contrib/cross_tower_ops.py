"""The operations as they were spelled when a replica was a tower."""

from __future__ import annotations

from typing import Any

from unisono.contrib.cross_device_ops import (
    AllReduceCrossDeviceOps,
    ContribOps,
    ReductionToOneDeviceCrossDeviceOps,
)
from unisono.errors import UnsupportedError
from unisono.options import ReduceOp, VariableAggregation
from unisono.values import Mirrored

_REDUCE_OPS = {
    VariableAggregation.SUM: ReduceOp.SUM,
    VariableAggregation.MEAN: ReduceOp.MEAN,
}


class CrossTowerOps(ContribOps):
    """The base of cross-tower reductions: `aggregation` for the operation, `PerDevice` values.

    A subclass overrides `reduce_implementation`, as one of `unisono.CrossDeviceOps` does.
    """

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
        return super().reduce(_reduce_op(aggregation), per_device_value, destinations)

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
        return super().batch_reduce(_reduce_op(aggregation), value_destination_pairs)


class AllReduceCrossTowerOps(CrossTowerOps, AllReduceCrossDeviceOps):
    """`AllReduceCrossDeviceOps` in the spelling of `CrossTowerOps`."""


class ReductionToOneDeviceCrossTowerOps(CrossTowerOps, ReductionToOneDeviceCrossDeviceOps):
    """`ReductionToOneDevice` in the spelling of `CrossTowerOps`."""


def _reduce_op(aggregation: VariableAggregation) -> ReduceOp:
    if not isinstance(aggregation, VariableAggregation) or aggregation not in _REDUCE_OPS:
        known = " or ".join(map(str, _REDUCE_OPS))
        raise UnsupportedError(f"`aggregation` must be {known}, got {aggregation!r}.")
    return _REDUCE_OPS[aggregation]
