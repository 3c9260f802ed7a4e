"""Input that functions of the program make: batches of per-replica size, and values of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from unisono.arguments import check_callable
from unisono.devices import Device
from unisono.errors import UnsupportedError
from unisono.input.distributed_input import DistributedInput, layout_of
from unisono.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
    check_input_options,
)
from unisono.input.source.epoch import Epoch, Readers
from unisono.input.source.shares import check_share
from unisono.input.source.sources import FunctionSource, Source, as_source
from unisono.input.split.splitter import MISSING, Draw, SplitBatch, Splitter, grouped
from unisono.reductions import Workers
from unisono.values import take_apart

if TYPE_CHECKING:
    from unisono.workers.elastic import ElasticJob

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
        job: ElasticJob | None = None,
    ) -> None:
        check_callable("dataset_fn", dataset_fn)
        options = check_input_options(options)
        if options.auto_shard_policy is not AutoShardPolicy.AUTO:
            raise UnsupportedError(
                f"`auto_shard_policy` must be AUTO here, got {options.auto_shard_policy.name}. "
                "Your function decides what each worker reads: shard by its `InputContext`."
            )
        contexts = [input_context]
        is_per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
        if is_per_replica:
            layout = layout_of(workers, input_context, len(devices))
            total = input_context.num_replicas_in_sync
            own = layout.own if job is None else range(total)
            contexts = [InputContext(layout.total, number, total) for number in own]
        self._dataset_fn = dataset_fn
        given = [_made(dataset_fn, context) for context in contexts]
        # In an elastic job, every worker calls the function for all replicas.
        is_for_all = is_per_replica and job is not None
        readers = Readers(workers, job, own_data=not is_for_all)
        sources = [_source(one) for one in given]
        super().__init__(sources, given, devices, input_context, options, readers, job)

    def _sources_again(self) -> tuple[Source, ...]:
        self._given = (_made(self._dataset_fn, self._context),)
        return (_source(self._given[0]),)

    @property
    def takes_batch_per_replica(self) -> bool:
        mode = self.options.experimental_replication_mode
        return mode is not InputReplicationMode.PER_REPLICA

    def parts(self, epoch: Epoch, splitter: Splitter) -> Draw:
        return lambda: splitter.join([next(epoch.batches[0])])

    def steps(self, epoch: Epoch, splitter: Splitter) -> Draw:
        per_step = epoch.progress.batches_per_step
        drops_rest = any(source.drops_rest for source in epoch.sources)

        def draw() -> SplitBatch:
            drawn = [next(batches, MISSING) for batches in epoch.batches for _ in range(per_step)]
            num_missing = sum(batch is MISSING for batch in drawn)
            if num_missing == len(drawn) or (num_missing and drops_rest):
                raise StopIteration
            return splitter.join(drawn)

        return draw

    def __len__(self) -> int:
        per_step = self.batches_per_step
        if any(source.drops_rest for source in self._sources):
            return min(num_batches // per_step for num_batches in self._num_batches())
        return max(-(-num_batches // per_step) for num_batches in self._num_batches())


def _made(dataset_fn: DatasetFn, context: InputContext) -> Any:
    made = dataset_fn(context)
    check_share(made, context)
    return made


def _source(made: Any) -> Source:
    if callable(made) and not isinstance(made, Iterable):
        return FunctionSource(made)
    try:
        return as_source(made)
    except UnsupportedError as error:
        raise UnsupportedError(f"The input function did not return batches. {error}") from error


def values_from_function(
    value_fn: Callable[[ValueContext], Any],
    devices: Sequence[Device],
    value_contexts: Iterable[ValueContext],
    *,
    own: slice = slice(None),
    generation: int | None = None,
) -> Any:
    """Calls `value_fn` once per replica and returns the structure with `PerReplica` leaves.

    In an elastic job of some `generation` it is called for all replicas, of which `own` are those
    of this worker.
    """
    check_callable("value_fn", value_fn)
    values = [value_fn(context) for context in value_contexts]
    tree, *others = (take_apart(value)[0] for value in values)
    # Every leaf is taken by itself, unless lists have different lengths.
    is_one_tree = all(other == tree for other in others)
    made = grouped(values, tree=tree if is_one_tree else None)
    if generation is not None:
        made = replace(made.of(own), of_all=made.leaves, generation=generation)
    return made.distributed(tuple(devices))
