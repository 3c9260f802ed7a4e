"""Reductions over the replicas of a strategy, to devices."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from unisono.arguments import in_words
from unisono.errors import UnsupportedError
from unisono.options import CommunicationOptions, ReduceOp
from unisono.reductions import CrossDeviceOps, ReplicaLayout, destinations_of, listed_pairs
from unisono.values import DistributedValues, Mirrored, flatten
from unisono.variables import Variable

if TYPE_CHECKING:
    from unisono.strategies.counting import Counting
    from unisono.strategies.elastic_job import ElasticJob
    from unisono.strategies.strategy import Strategy


class ReduceMethods:
    """The part of an extension that reduces values."""

    if TYPE_CHECKING:
        layout: ReplicaLayout
        cross_device_ops: CrossDeviceOps
        counting: Counting
        options: CommunicationOptions
        elastic: ElasticJob | None

        @property
        def strategy(self) -> Strategy:
            """See `StrategyExtended.strategy`."""

        @property
        def num_replicas_in_sync(self) -> int:
            """See `StrategyExtended.num_replicas_in_sync`."""

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces a value, or every distributed value of a nested structure, to devices.

        See `CrossDeviceOps.reduce`; `reduce_op` may be a name. Values that know the samples of
        their replicas are reduced as `Strategy.reduce` says. A mirrored `value` is its own mean,
        and has no sum: that is an `UnsupportedError`.
        """
        self.strategy._check_cross_replica("reduce_to()")
        op = ReduceOp.read(reduce_op)
        if not isinstance(value, DistributedValues):
            leaves, rebuild = flatten(value)
            if any(isinstance(leaf, DistributedValues) for leaf in leaves):
                return rebuild([self.reduce_to(op, leaf, destinations, options) for leaf in leaves])
            if self.layout.are_several or self.elastic is not None:
                return self._reduce_single(op, value, destinations)
        if isinstance(value, Mirrored) or (isinstance(value, Variable) and value.is_mirrored):
            if op is ReduceOp.SUM and self.num_replicas_in_sync > 1:
                raise UnsupportedError(
                    "A mirrored value is the same on every replica, so its sum over replicas has "
                    "no meaning. Use MEAN, or multiply it by the number of replicas."
                )
            return self.broadcast_to(value, destinations)
        if self.elastic is not None:
            reduce = functools.partial(self._reduce, op, value, destinations, options)
            return self.elastic.reduce(op, value, destinations, reduce)
        return self._reduce(op, value, destinations, options)

    def _reduce(
        self, op: ReduceOp, value: Any, destinations: Any, options: CommunicationOptions | None
    ) -> Any:
        value = self.counting.counted(op, value)
        return self.cross_device_ops.reduce(op, value, destinations, self._merged(options))

    def _reduce_single(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        """Reduces what is not distributed: the same on every replica."""
        is_zero = isinstance(value, (int, float)) and value == 0
        if op is ReduceOp.SUM and not is_zero:
            raise UnsupportedError(
                f"{in_words(value)} is a single value, not one value per replica, so its sum over "
                f"{self.num_replicas_in_sync} replicas has no meaning. Reduce what `run` returns."
            )
        return self.broadcast_to(value, destinations)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces many values to devices; see `CrossDeviceOps.batch_reduce`."""
        self.strategy._check_cross_replica("batch_reduce_to()")
        op = ReduceOp.read(reduce_op)
        listed = listed_pairs(value_destination_pairs)
        pairs = [(self.counting.counted(op, value), where) for value, where in listed]
        return list(self.cross_device_ops.batch_reduce(op, pairs, self._merged(options)))

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to devices; see `CrossDeviceOps.broadcast`."""
        self.strategy._check_cross_replica("broadcast_to()")
        return self.cross_device_ops.broadcast(tensor, destinations_of(destinations))

    def _merged(self, options: CommunicationOptions | None) -> CommunicationOptions:
        return self.options.merge(options)
