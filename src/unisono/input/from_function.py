"""Input that a function makes: datasets of per-replica batches, and single values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from unisono.arguments import check_callable
from unisono.devices import Device
from unisono.errors import UnsupportedError
from unisono.input.context import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
    check_input_options,
)
from unisono.input.dataset import DealtDataset
from unisono.input.iterator import Deal
from unisono.input.passes import Pass
from unisono.input.readers import readers_of
from unisono.input.sharding import AutoShardPolicy
from unisono.input.source import Source
from unisono.input.sources import FunctionSource, as_source
from unisono.input.splitting import Parts, empty_like, join
from unisono.reductions import Workers

DatasetFn: TypeAlias = Callable[[InputContext], Any]

_END: Any = object()


class DistributedDatasetsFromFunction(DealtDataset):
    """Batches of per-replica size that `dataset_fn` makes, dealt whole: one a replica and step.

    In the last step the replicas that are left without a batch get an empty one. The step is
    dropped if its elements have no batch dimension, or if the `DataLoader` drops incomplete
    batches too. Of many workers, those that come to their end sooner get empty batches until all
    are done; elements without a batch dimension end for all with the first.

    Args:
        dataset_fn: Returns a `DataLoader`, an iterable of batches, or a function that returns a
            batch. It is called at once: once, or once a replica with `PER_REPLICA`.
        input_context: What it is called with. With `PER_REPLICA` each replica is a pipeline.
        devices: The devices of this host's replicas.
        options: How batches are fetched.
        workers: What connects this worker to the others; None if nothing does.
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
                "What a function makes is shared by the function, which is told which pipeline it "
                f"makes: `auto_shard_policy` must be AUTO, got {options.auto_shard_policy.name}."
            )
        contexts = [input_context]
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            contexts = _replica_contexts(input_context, len(devices))
        self._batches_per_step = len(devices) // len(contexts)
        sources = [_called(dataset_fn, context) for context in contexts]
        readers = readers_of(workers, own_data=True)
        super().__init__(sources, devices, input_context, options, readers)

    @property
    def batches_per_step(self) -> int:
        """See `DealtDataset.batches_per_step`."""
        return self._batches_per_step

    def deal(self, opened: Pass) -> Deal:
        """See `DealtDataset.deal`."""
        return _WholeSteps(opened)

    def __len__(self) -> int:
        per_step = self.batches_per_step
        if any(source.drops_rest for source in self._sources):
            return min(num_batches // per_step for num_batches in self._num_batches())
        return max(-(-num_batches // per_step) for num_batches in self._num_batches())


class _WholeSteps(Deal):
    def draw(self) -> Parts:
        per_step = self.opened.progress.batches_per_step
        drawn = [next(batches, _END) for batches in self.opened.batches for _ in range(per_step)]
        found = [batch for batch in drawn if batch is not _END]
        if not found:
            raise StopIteration
        if len(found) < len(drawn):
            nothing = empty_like(found[0])
            if nothing is None or any(source.drops_rest for source in self.opened.sources):
                raise StopIteration
            drawn = [nothing if batch is _END else batch for batch in drawn]
        return join(drawn)


def values_from_function(
    value_fn: Callable[[ValueContext], Any],
    devices: Sequence[Device],
    value_contexts: Iterable[ValueContext] | None = None,
) -> Any:
    """Calls `value_fn` once a replica and returns the structure with `PerReplica` leaves.

    Args:
        value_fn: Makes the value of a replica. It is used as it is, wherever it lives.
        devices: The devices of this host's replicas.
        value_contexts: What it is called with. None means that there is no other host.
    """
    if value_contexts is None:
        value_contexts = [ValueContext(i, len(devices)) for i in range(len(devices))]
    check_callable("value_fn", value_fn)
    parts = join([value_fn(context) for context in value_contexts])
    return parts.tree.build_distributed(parts.leaves, tuple(devices))


def _replica_contexts(context: InputContext, num_replicas: int) -> list[InputContext]:
    first = context.input_pipeline_id * num_replicas
    num_pipelines = context.num_input_pipelines * num_replicas
    return [
        InputContext(num_pipelines, first + i, context.num_replicas_in_sync)
        for i in range(num_replicas)
    ]


def _called(dataset_fn: DatasetFn, context: InputContext) -> Source:
    made = dataset_fn(context)
    if callable(made) and not isinstance(made, Iterable):
        return FunctionSource(made)
    try:
        return as_source(made)
    except UnsupportedError as error:
        raise UnsupportedError(f"`dataset_fn` returned no batches. {error}") from error
