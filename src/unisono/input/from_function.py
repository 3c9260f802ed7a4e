"""Input that a function makes: datasets of per-replica batches, and single values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from unisono.arguments import check_callable
from unisono.devices import Device
from unisono.errors import UnsupportedError
from unisono.input.dataset import DistributedInput, layout_of
from unisono.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
    check_input_options,
)
from unisono.input.sources import Epoch, FunctionSource, Source, as_source, check_share, readers_of
from unisono.input.splits import BatchPerReplica, SplitEpoch, Splitter, grouped
from unisono.reductions import Workers
from unisono.values import take_apart

DatasetFn: TypeAlias = Callable[[InputContext], Any]


class DistributedDatasetsFromFunction(DistributedInput):
    """Batches of per-replica size that `dataset_fn` makes, one for each replica and step.

    In the last step the replicas that are left without a batch get a sample of another one, which
    counts nothing. The step is dropped if the `DataLoader` drops incomplete batches, too. Of many
    workers, those that come to their end sooner get such samples until all are done. With
    `InputOptions(split="tensorflow")` these batches are empty; elements without a batch dimension
    then end with the last full step, and for all workers with the first that has no more.
    """

    def __init__(
        self,
        dataset_fn: DatasetFn,
        input_context: InputContext,
        devices: Sequence[Device],
        options: InputOptions | None = None,
        *,
        workers: Workers | None = None,
    ) -> None:
        check_callable("dataset_fn", dataset_fn)
        options = check_input_options(options)
        if options.auto_shard_policy is not AutoShardPolicy.AUTO:
            raise UnsupportedError(
                f"`auto_shard_policy` must be AUTO here, got {options.auto_shard_policy.name}. "
                "Your function decides what each worker reads: shard by its `InputContext`."
            )
        contexts = [input_context]
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            layout = layout_of(workers, input_context, len(devices))
            total = input_context.num_replicas_in_sync
            contexts = [InputContext(layout.total, number, total) for number in layout.own]
        self._batches_per_step = len(devices) // len(contexts)
        given = [dataset_fn(context) for context in contexts]
        for one, context in zip(given, contexts, strict=True):
            check_share(one, context)
        readers = readers_of(workers, own_data=True)
        super().__init__(
            [_source(one) for one in given], given, devices, input_context, options, readers
        )

    @property
    def batches_per_step(self) -> int:
        return self._batches_per_step

    @property
    def batches_by_worker(self) -> int | list[int]:
        """See `DistributedInput.batches_by_worker`."""
        mode = self.options.experimental_replication_mode
        is_each_one = mode is InputReplicationMode.PER_REPLICA or self.layout.are_equal
        return self._batches_per_step if is_each_one else list(self.layout.counts)

    def split(self, epoch: Epoch) -> SplitEpoch:
        return BatchPerReplica(epoch, Splitter(self.options))

    def __len__(self) -> int:
        per_step = self.batches_per_step
        if any(source.drops_rest for source in self._sources):
            return min(num_batches // per_step for num_batches in self._num_batches())
        return max(-(-num_batches // per_step) for num_batches in self._num_batches())


def values_from_function(
    value_fn: Callable[[ValueContext], Any],
    devices: Sequence[Device],
    value_contexts: Iterable[ValueContext] | None = None,
) -> Any:
    """Calls `value_fn` once per replica and returns the structure with `PerReplica` leaves."""
    if value_contexts is None:
        value_contexts = [ValueContext(i, len(devices)) for i in range(len(devices))]
    check_callable("value_fn", value_fn)
    values = [value_fn(context) for context in value_contexts]
    tree, *others = (take_apart(value)[0] for value in values)
    # Every leaf is taken by itself, unless lists have different lengths.
    is_one_tree = all(other == tree for other in others)
    return grouped(values, tree=tree if is_one_tree else None).distributed(tuple(devices))


def _source(made: Any) -> Source:
    if callable(made) and not isinstance(made, Iterable):
        return FunctionSource(made)
    try:
        return as_source(made)
    except UnsupportedError as error:
        raise UnsupportedError(f"`dataset_fn` did not return batches. {error}") from error
