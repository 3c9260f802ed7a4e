"""The cross-device operations of `tf.contrib.distribute`, with what their pages promise.

A list of device names is a destination, and a result is always a `Mirrored`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from unisono.arguments import check_int, in_words
from unisono.devices import DeviceLike
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import PackingRule, SmallGroups
from unisono.reductions import (
    CrossDeviceOps,
    Destinations,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    Pair,
    ReductionToOneDevice,
    Result,
    always_mirrored,
    listed_destinations,
    listed_pairs,
    mirrored,
)
from unisono.reductions.scheduled import AccumulationFn
from unisono.values import DistributedValues, Mirrored, components_of

_ALGORITHMS = {"nccl": NcclAllReduce, "hierarchical_copy": HierarchicalCopyAllReduce}


class ContribOps(CrossDeviceOps):
    """What the pages of `tf.contrib.distribute` promise of every operation.

    A subclass overrides the methods that its page names, or the `*_implementation` methods. If it
    overrides `reduce` and nothing for batches, a strategy reduces batches with `reduce`, too.
    """

    # What does the work; None if a subclass does.
    _ops: CrossDeviceOps | None = None

    def in_strategy(self) -> CrossDeviceOps:
        if self._ops is None or is_overridden(self, *_ONE, *_BATCH, *_OTHERS):
            return InStrategy(self)
        return self._ops

    def _older_op(self, op: ReduceOp) -> Any:
        """Returns an operation as the public methods take it."""
        return op

    def _older_value(self, value: Any) -> Any:
        """Returns a value as the public methods take it."""
        return value

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Mirrored:
        """See `CrossDeviceOps.reduce`; `destinations` may be a list of device names, too.

        Returns:
            A `Mirrored`, also for one device. The same holds for the other methods.
        """
        targets = listed_destinations(destinations)
        return always_mirrored(
            super().reduce(reduce_op, per_replica_value, targets, options), targets
        )

    def batch_reduce(  # type: ignore[override]
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Mirrored]:
        """See `CrossDeviceOps.batch_reduce`; destinations may be lists of device names, too."""
        pairs = [
            (value, listed_destinations(to)) for value, to in listed_pairs(value_destination_pairs)
        ]
        results = super().batch_reduce(reduce_op, pairs, options)
        return [
            always_mirrored(result, targets)
            for result, (_, targets) in zip(results, pairs, strict=True)
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """See `CrossDeviceOps.broadcast`; `destinations` may be a list of device names, too."""
        targets = listed_destinations(destinations)
        return always_mirrored(super().broadcast(tensor, targets), targets)


# The methods that reduce one value, those that reduce a batch, and those that do neither.
_ONE = ("reduce", "_reduce", "reduce_implementation")
_BATCH = ("batch_reduce", "_batch_reduce", "batch_reduce_implementation")
_OTHERS = ("broadcast", "_broadcast", "broadcast_implementation")


def is_overridden(ops: CrossDeviceOps, *names: str) -> bool:
    """Whether a subclass of the program overrides one of the methods `names`."""
    methods = (getattr(type(ops), name, None) for name in names)
    return any(one and not one.__module__.startswith("unisono.") for one in methods)


def is_one_by_one(ops: CrossDeviceOps) -> bool:
    """Whether a subclass of the program reduces single values in its own way, but not batches."""
    return is_overridden(ops, "reduce", "_reduce") and not is_overridden(ops, *_BATCH)


class InStrategy(CrossDeviceOps):
    """Lets a strategy reduce with operations that are called with the arguments on their pages."""

    def __init__(self, ops: ContribOps) -> None:
        self._ops = ops

    def close(self) -> None:
        self._ops.close()

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Result:
        op, value = self._ops._older_op(reduce_op), self._ops._older_value(per_replica_value)
        result = self._ops.reduce(op, value, names_of(destinations))
        return self._taken("reduce", result, destinations)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[Pair],
        options: CommunicationOptions,
    ) -> list[Result]:
        ops, op = self._ops, self._ops._older_op(reduce_op)
        pairs = [(ops._older_value(value), names_of(to)) for value, to in value_destination_pairs]
        if is_one_by_one(ops):
            results = [ops.reduce(op, value, names) for value, names in pairs]
        else:
            results = list(ops.batch_reduce(op, pairs))
        if len(results) != len(pairs):
            raise ReplicaMismatchError(
                f"`{type(ops).__name__}.batch_reduce()` returned {len(results)} results for "
                f"{len(pairs)} values. Return one result per value, in the same order."
            )
        return [
            self._taken("batch_reduce", result, targets)
            for result, (_, targets) in zip(results, value_destination_pairs, strict=True)
        ]

    def broadcast_implementation(self, tensor: Tensor, destinations: Destinations) -> Result:
        result = self._ops.broadcast(tensor, names_of(destinations))
        return self._taken("broadcast", result, destinations)

    def _taken(self, method: str, result: Any, destinations: Destinations) -> Result:
        """Returns what a method returned as strategies have it: one device, the tensor itself."""
        parts = components_of(result)
        if len(parts) != len(destinations.devices) or not all(isinstance(p, Tensor) for p in parts):
            raise ReplicaMismatchError(
                f"`{type(self._ops).__name__}.{method}()` must return a `Mirrored` with one tensor "
                f"for each of {', '.join(names_of(destinations))}, got {result!r}."
            )
        return mirrored(tuple(parts), destinations)


def names_of(destinations: Destinations) -> list[str]:
    """Returns destinations as a list of device names, the form that all contrib pages take."""
    return [str(device) for device in destinations.devices]


class DelegatingOps(ContribOps):
    """Leaves the work to another operation."""

    reads_values = True
    _ops: CrossDeviceOps

    def __init__(self, ops: CrossDeviceOps) -> None:
        self._ops = ops

    @property
    def is_tree_sum(self) -> bool:
        return self._ops.is_tree_sum and super().is_tree_sum

    def close(self) -> None:
        self._ops.close()

    # Arguments as in `CrossDeviceOps`.

    def reduce_implementation(self, *args: Any, **kwargs: Any) -> Result:
        return self._ops.reduce(*args, **kwargs)

    def batch_reduce_implementation(self, *args: Any, **kwargs: Any) -> list[Result]:
        return self._ops.batch_reduce(*args, **kwargs)

    def broadcast_implementation(self, *args: Any, **kwargs: Any) -> Result:
        return self._ops.broadcast(*args, **kwargs)


class AllReduceCrossDeviceOps(DelegatingOps):
    """All-reduces through NCCL or by hierarchical copy, with one of three ways to pack.

    `num_packs` above 0 concatenates all values and splits them into this number of packs. If it is
    0 and both `agg_small_grads_*` are above 0, neighboring float32 values of at most
    `agg_small_grads_max_bytes` share packs of at most `agg_small_grads_max_group` values. Otherwise
    each value is reduced alone.

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
        check_int("num_packs", num_packs)
        check_int("agg_small_grads_max_bytes", agg_small_grads_max_bytes)
        check_int("agg_small_grads_max_group", agg_small_grads_max_group)
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
