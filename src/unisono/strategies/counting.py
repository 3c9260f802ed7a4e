"""What each replica counts for: in gradients, and where values of replicas are combined."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from unisono.devices import Device
from unisono.errors import ReplicaMismatchError
from unisono.input import counts_of
from unisono.options import ReduceOp
from unisono.reductions import Workers
from unisono.values import (
    DistributedValues,
    PerReplica,
    components_of,
    factors_of,
    flatten,
    map_leaves,
    regroup,
    tensors_of,
    weighed,
)

_logger = logging.getLogger("unisono")


class Counting:
    """Knows how many samples each replica has in a run, and had in those before.

    Args:
        is_moving: Whether a worker may get other replicas: it then returns `PerReplica` values,
            however many replicas it has.

    Attributes:
        is_wrapped: Whether results are `PerReplica` values, on all workers.
        samples: How many samples each replica of all workers has in the run under way. None if all
            have the same number, or if it is not known.
        share: What a weight in a mean over all replicas is multiplied by in a mean over those that
            have samples.
    """

    def __init__(
        self, devices: tuple[Device, ...], workers: Workers, *, is_moving: bool = False
    ) -> None:
        self._devices = devices
        layout = workers.layout(len(devices))
        self._own = slice(layout.own.start, layout.own.stop)
        self._num_replicas = layout.total
        self.is_wrapped = layout.are_several or is_moving
        self._is_mixed = (layout.are_several and 1 in layout.counts) or is_moving
        self.samples: tuple[int, ...] | None = None
        self.share = 1.0
        # Of tensors that the only replica of this worker has returned. They come bare, while a
        # `PerReplica` knows its samples by itself.
        self._marks: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # Whether to tell if batches are given to runs that are not distributed, and the first one.
        self._is_watching = self._num_replicas > 1
        self._whole: weakref.ref[Tensor] | None = None

    def begin(self, inputs: Any, op: ReduceOp) -> list[float]:
        """Before a run: returns what the gradients of each replica count for.

        A loss that is a mean over the replica's batch makes the mean over replicas that of all
        samples only if the batches are even, or are weighted so.
        """
        if self._num_replicas == 1 and not any(isinstance(one, PerReplica) for one in inputs):
            return [1.0]
        if self._is_watching:
            self._watch(inputs)
        counts = counts_of(inputs)
        if counts is not None and len(counts) > self._num_replicas:
            raise ReplicaMismatchError(
                f"`run()` is given a batch for {len(counts)} replicas, but there are "
                f"{self._num_replicas}, so samples would be lost. Distribute the input with the "
                "strategy that runs the step."
            )
        is_known = counts is not None and len(counts) == self._num_replicas
        self.samples = counts if is_known and len(set(counts or ())) > 1 else None
        presence = self.presence if op is ReduceOp.MEAN else None
        self.share = 1.0 if presence is None else sum(presence) / len(presence)
        return self._factors(op, self.samples) or [1.0] * len(self._devices)

    def _watch(self, inputs: Any) -> None:
        """Warns once if batches go whole to every replica.

        One tensor may, such as a graph: the warning needs a second one. A program that has
        distributed something knows how to.
        """
        leaves, _ = flatten(inputs)
        if any(isinstance(leaf, DistributedValues) for leaf in leaves):
            self._is_watching = False
            return
        tensors = (one for one in leaves if isinstance(one, Tensor) and one.dim() > 0)
        batch = next((one for one in tensors if one.size(0) > 1), None)
        if batch is None or (self._whole is not None and self._whole() is batch):
            return
        if self._whole is None:
            self._whole = weakref.ref(batch)
            return
        self._is_watching = False
        _logger.warning(
            "`run()` is given tensors that are not distributed, such as one of shape %s now. Each "
            "of the %d replicas gets all of what its worker passes. Iterate "
            "`strategy.experimental_distribute_dataset(loader)` to split batches over them, or "
            "pass a `PerReplica`. This is said once.",
            tuple(batch.shape),
            self._num_replicas,
        )

    def factors(self, op: ReduceOp) -> list[float]:
        """Returns what the values of this worker's replicas count for in the run under way."""
        return self._factors(op, self.presence)

    @property
    def presence(self) -> tuple[int, ...] | None:
        """For each replica of all workers whether it has samples, 1 or 0. None if all have."""
        if self.samples is None or all(self.samples):
            return None
        return tuple(min(count, 1) for count in self.samples)

    def _factors(self, op: ReduceOp, counts: tuple[int, ...] | None) -> list[float]:
        if counts is None or len(set(counts)) == 1:
            return []
        return [*factors_of(op, counts)[self._own]]

    def counted(self, op: ReduceOp, value: Any) -> Any:
        """Returns `value` as it enters a reduction, with what its replicas count for in it."""
        factors = self._factors(op, self._counts_of(value))
        if not factors:
            return value
        return PerReplica.placed(weighed(op, components_of(value), factors), self._devices)

    def are_counted(self, *values: Any) -> list[bool]:
        """Returns for each replica of this worker whether its components of `values` count."""
        for value in values:
            factors = self._factors(ReduceOp.SUM, self._counts_of(value))
            if 0.0 in factors:
                return [factor != 0.0 for factor in factors]
        return [True] * len(self._devices)

    def regrouped(self, results: Sequence[Any], *, are_arguments: bool = False) -> Any:
        """Makes one structure of what the replicas of this worker have returned.

        If some workers have one replica and others several, tensors and numbers are `PerReplica`
        values on all workers, also where replicas share an object. Numbers that are arguments of a
        `merge_call` stay as they are: they may be settings, such as an axis.
        """
        if self.is_wrapped:
            grouped = regroup(results, self._devices, self.samples)
            if not self._is_mixed:
                return grouped
            kinds = (Tensor,) if are_arguments else (Tensor, int, float, complex)
            return map_leaves(functools.partial(self._wrapped, kinds), grouped)
        if self.samples is not None or self._marks:
            for tensor in tensors_of(results[0]):
                self._marks.pop(tensor, None)
                if self.samples is not None:
                    self._marks[tensor] = self.samples
        return results[0]

    def _wrapped(self, kinds: tuple[type, ...], leaf: Any) -> Any:
        if isinstance(leaf, kinds):
            return PerReplica.placed((leaf,) * len(self._devices), self._devices, self.samples)
        return leaf

    def _counts_of(self, value: Any) -> tuple[int, ...] | None:
        if isinstance(value, PerReplica):
            counts = value.counts
        else:
            is_marked = bool(self._marks) and isinstance(value, Tensor)
            counts = self._marks.get(value) if is_marked else None
        return counts if counts is not None and len(counts) == self._num_replicas else None
