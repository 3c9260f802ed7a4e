"""`DistributedDataset`: each global batch is split over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.devices import Device
from unisono.errors import UnsupportedError
from unisono.input.distributed import DistributedInput
from unisono.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    check_input_options,
)
from unisono.input.sources.epoch import Epoch
from unisono.input.sources.readers import Moving, Readers
from unisono.input.sources.shares import check_share, of_all_samples, of_own_files
from unisono.input.sources.source import Source, as_source
from unisono.input.splits.splitter import Splitter
from unisono.input.splits.steps import OwnBatches, SharedBatches, SplitEpoch, WholeBatches
from unisono.reductions import Workers


class DistributedDataset(DistributedInput):
    """Global batches, each split over the replicas.

    Args:
        source: A `DataLoader` with the global batch size, or any iterable of batches.
        devices: The devices of this host's replicas.
        options: How batches are fetched.
        input_context: Which worker of how many this is. None means the only one.
        workers: What connects it to the others; None if nothing does.
        job: The elastic job that this is the input of, if it is one.
    """

    def __init__(
        self,
        source: Any,
        devices: Sequence[Device],
        options: InputOptions | None = None,
        *,
        input_context: InputContext | None = None,
        workers: Workers | None = None,
        job: Moving | None = None,
    ) -> None:
        options = check_input_options(options)
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "There is one dataset per worker, and it is split over the replicas. Use "
                f"`distribute_datasets_from_function` for {InputReplicationMode.PER_REPLICA}."
            )
        if isinstance(source, DistributedInput):
            raise UnsupportedError("This dataset is already distributed. Iterate over it directly.")
        context = input_context or InputContext(num_replicas_in_sync=len(devices))
        policy = options.auto_shard_policy
        self._is_fixed = policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)
        readers = Readers(workers, job, own_data=self._is_fixed)
        self._is_lost_for_good = policy is not AutoShardPolicy.FILE
        self._later = "In the next epoch, its files are divided among the other workers."
        if self._is_lost_for_good:
            self._later = "No other worker reads its data in later epochs."
        sources = [self._source(source, options, context)]
        super().__init__(sources, [source], devices, context, options, readers, job)

    def _source(self, given: Any, options: InputOptions, context: InputContext) -> Source:
        """Returns what this worker reads."""
        if not self._is_fixed:
            return as_source(of_all_samples(given))
        if options.auto_shard_policy is AutoShardPolicy.FILE and context.num_input_pipelines > 1:
            return as_source(of_own_files(given, context))
        check_share(given, context)
        return as_source(given)

    def _sources_again(self) -> tuple[Source, ...]:
        if self.options.auto_shard_policy is AutoShardPolicy.FILE:
            return (self._source(self._given[0], self.options, self._context),)
        return self._sources

    def _named(self, worker: int) -> str:
        workers = list(dict.fromkeys(self._made_owners))
        if self._is_lost_for_good or worker not in workers:
            return ""
        num_files = len(getattr(self._given[0].dataset, "datasets", ()))
        files = range(num_files)[workers.index(worker) :: len(workers)]
        return f" in file{'s'[: len(files) - 1]} {', '.join(map(str, files))} of {num_files}"

    @property
    def takes_batch_per_replica(self) -> bool:
        return self._is_fixed and not self.layout.are_equal

    @property
    def steps_per_batch(self) -> int:
        """See `DistributedInput.steps_per_batch`.

        A worker with its own batches splits each batch into one part per replica of all workers. In
        each step it uses one part per replica that it has, so all workers together use one global
        batch per step. If workers have different numbers of replicas, this is the number of steps
        over which `batches_per_step` batches are split.
        """
        if not self._is_fixed:
            return 1
        layout = self.layout
        return len(layout.counts) if layout.are_equal else layout.total

    @property
    def static_batch_size(self) -> int | None:
        size, num_replicas = super().static_batch_size, self._context.num_replicas_in_sync
        return None if size is None or size % num_replicas else size // num_replicas

    def split(self, epoch: Epoch) -> SplitEpoch:
        splitter = Splitter(self.options, epoch.sources[0].batch_size)
        if not self.is_wrapped:
            return WholeBatches(epoch, splitter)
        if self._is_fixed:
            return OwnBatches(epoch, splitter, self.layout)
        return SharedBatches(epoch, splitter, self.layout, keeps_all=self.job is not None)

    def __len__(self) -> int:
        return self._num_batches()[0] * self.steps_per_batch
