"""The cross-device operations of `tf.contrib.distribute`, with what their pages promise.

A list of device names is a destination, and a result is always a `Mirrored`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from unisono.arguments import check_int, in_words
from unisono.devices import DeviceLike, resolve
from unisono.errors import DestinationError, UnsupportedError
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import PackingRule, SmallGroups
from unisono.reductions import (
    AccumulationFn,
    CrossDeviceOps,
    Destinations,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    Pair,
    ReductionToOneDevice,
    Result,
    destinations_of,
    listed_pairs,
)
from unisono.values import DistributedValues, Mirrored

_ALGORITHMS = {"nccl": NcclAllReduce, "hierarchical_copy": HierarchicalCopyAllReduce}


class ContribOps(CrossDeviceOps):
    """What the pages of `tf.contrib.distribute` promise of every operation."""

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Mirrored:
        """See `CrossDeviceOps.reduce`; `destinations` may be a list of device names, too.

        Returns:
            A `Mirrored`, also for one device.
        """
        targets = _listed(destinations)
        return _always_mirrored(
            super().reduce(reduce_op, per_replica_value, targets, options), targets
        )

    def batch_reduce(  # type: ignore[override]
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Mirrored]:
        """See `CrossDeviceOps.batch_reduce`; destinations may be lists of device names, too.

        Returns:
            A list of `Mirrored`, in the order of the pairs.
        """
        pairs = [(value, _listed(to)) for value, to in listed_pairs(value_destination_pairs)]
        results = super().batch_reduce(reduce_op, pairs, options)
        return [
            _always_mirrored(result, targets)
            for result, (_, targets) in zip(results, pairs, strict=True)
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """See `CrossDeviceOps.broadcast`; `destinations` may be a list of device names, too.

        Returns:
            A `Mirrored`, also for one device.
        """
        targets = _listed(destinations)
        return _always_mirrored(super().broadcast(tensor, targets), targets)


class DelegatingOps(ContribOps):
    """Leaves the work to another operation."""

    reads_values = True

    def __init__(self, ops: CrossDeviceOps) -> None:
        self._ops = ops

    def close(self) -> None:
        """See `CrossDeviceOps.close`."""
        self._ops.close()

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Result:
        """See `CrossDeviceOps.reduce_implementation`."""
        return self._ops.reduce(reduce_op, per_replica_value, destinations, options)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[Pair],
        options: CommunicationOptions,
    ) -> list[Result]:
        """See `CrossDeviceOps.batch_reduce_implementation`."""
        return self._ops.batch_reduce(reduce_op, value_destination_pairs, options)


class AllReduceCrossDeviceOps(DelegatingOps):
    """All-reduces through NCCL or by hierarchical copy, with one of three ways to pack.

    1. `num_packs` above 0 puts all values end to end and cuts them into that many packs.
    2. Otherwise, where both `agg_small_grads_*` are above 0, neighbouring float32 values of at
       most `agg_small_grads_max_bytes` share packs of at most `agg_small_grads_max_group` values.
    3. Otherwise each value is reduced on its own.

    Args:
        all_reduce_alg: "nccl" or "hierarchical_copy".
        num_packs: See above.
        agg_small_grads_max_bytes: See above.
        agg_small_grads_max_group: See above.
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        if not isinstance(all_reduce_alg, str) or all_reduce_alg not in _ALGORITHMS:
            known = " or ".join(map(repr, _ALGORITHMS))
            raise UnsupportedError(
                f"`all_reduce_alg` must be {known}, got {in_words(all_reduce_alg)}."
            )
        for name, value in (
            ("num_packs", num_packs),
            ("agg_small_grads_max_bytes", agg_small_grads_max_bytes),
            ("agg_small_grads_max_group", agg_small_grads_max_group),
        ):
            check_int(name, value)
        rule: int | PackingRule = num_packs
        if num_packs == 0 and agg_small_grads_max_bytes > 0 and agg_small_grads_max_group > 0:
            rule = SmallGroups(agg_small_grads_max_bytes, agg_small_grads_max_group)
        super().__init__(_ALGORITHMS[all_reduce_alg](rule))


class ReductionToOneDeviceCrossDeviceOps(DelegatingOps):
    """`ReductionToOneDevice` as it was called in `tf.contrib.distribute`."""

    def __init__(
        self,
        reduce_to_device: DeviceLike | None = None,
        accumulation_fn: AccumulationFn | None = None,
    ) -> None:
        super().__init__(ReductionToOneDevice(reduce_to_device, accumulation_fn))


def _listed(destinations: Any) -> Destinations:
    if not isinstance(destinations, (list, tuple)) or isinstance(destinations, Destinations):
        return destinations_of(destinations)
    if not destinations:
        raise DestinationError("`destinations` is an empty list, so it names no device.")
    return Destinations(tuple(resolve(device) for device in destinations))


def _always_mirrored(result: Result, destinations: Destinations) -> Mirrored:
    if isinstance(result, Mirrored):
        return result
    return Mirrored.placed((result,), destinations.devices)
