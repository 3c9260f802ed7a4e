"""The datasets of a strategy: batches that are split, batches from a function, and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import TensorDataset

from unisono.devices import Device
from unisono.errors import UnsupportedError
from unisono.input.distributed_input import DistributedInput
from unisono.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    check_input_options,
)
from unisono.input.source.epoch import Epoch, Readers
from unisono.input.source.sources import Source, as_source, sampler_of
from unisono.input.split.layout import is_column
from unisono.input.split.splitter import Draw, Splitter
from unisono.kernels import check_layout
from unisono.reductions import Workers
from unisono.values import as_tensor, take_apart

if TYPE_CHECKING:
    from unisono.workers.elastic import ElasticJob


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
        job: ElasticJob | None = None,
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
        self._policy = options.auto_shard_policy
        self._is_fixed = self._policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)
        readers = Readers(workers, job, own_data=self._is_fixed)
        sources = [self._source(source, context)]
        super().__init__(sources, [source], devices, context, options, readers, job)

    def _source(self, given: Any, context: InputContext) -> Source:
        """Returns what this worker reads."""
        if sampler_of(given) is None and self._policy is not AutoShardPolicy.FILE:
            return as_source(given)
        from unisono.input.source.shares import check_share, of_all_samples, of_own_files

        if not self._is_fixed:
            return as_source(of_all_samples(given))
        if self._policy is AutoShardPolicy.FILE and context.num_input_pipelines > 1:
            return as_source(of_own_files(given, context))
        check_share(given, context)
        return as_source(given)

    def _sources_again(self) -> tuple[Source, ...]:
        if self._policy is AutoShardPolicy.FILE:
            return (self._source(self._given[0], self._context),)
        return self._sources

    def _data_of(self, worker: int) -> tuple[str, str, bool]:
        if self._policy is not AutoShardPolicy.FILE:
            return "", "No other worker reads its data in later epochs.", True
        named, workers = "", list(dict.fromkeys(self._made_owners))
        if worker in workers:
            num_files = len(getattr(self._given[0].dataset, "datasets", ()))
            files = range(num_files)[workers.index(worker) :: len(workers)]
            listed = ", ".join(map(str, files))
            named = f" in file{'s'[: len(files) - 1]} {listed} of {num_files}"
        return named, "In the next epoch, its files are divided among the other workers.", False

    @property
    def takes_batch_per_replica(self) -> bool:
        return self._is_fixed and not self.layout.are_equal

    @property
    def steps_per_batch(self) -> int:
        """Over how many steps each batch is split.

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

    def parts(self, epoch: Epoch, splitter: Splitter) -> Draw:
        if not self.is_wrapped:
            return lambda: splitter.whole(next(epoch.batches[0]))
        from unisono.input.split.own_data import parts_of_batches

        return parts_of_batches(epoch, splitter, self.layout)

    def steps(self, epoch: Epoch, splitter: Splitter) -> Draw:
        if not self.is_wrapped:
            return self.parts(epoch, splitter)
        layout = self.layout
        if self._is_fixed:
            from unisono.input.split.own_data import PartQueue

            queue = PartQueue(self.parts(epoch, splitter), splitter)
            return lambda: queue.take(len(layout.own))
        # A worker of an elastic job keeps all parts, because it may get other replicas.
        is_alone = self.job is None
        own = slice(layout.own.start, layout.own.stop) if is_alone else slice(None)
        return lambda: splitter.split(next(epoch.batches[0]), layout.total, own)

    def __len__(self) -> int:
        return self._num_batches()[0] * self.steps_per_batch


class ArrayDataset(TensorDataset):
    """The rows of an array, or of a tuple, list or dict of `arrays`, which are not copied.

    >>> ArrayDataset({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]})[1]
    {'x': tensor([3., 4.]), 'y': tensor(1)}
    """

    def __init__(self, arrays: Any) -> None:
        self._tree, leaves = take_apart(arrays, is_column)
        tensors = [as_tensor(leaf) for leaf in leaves]
        for tensor in tensors:
            check_layout(tensor, "An array of a dataset")
        sizes = {
            path or "the array": len(tensor) if tensor.dim() else "no rows"
            for path, tensor in zip(self._tree.paths, tensors, strict=True)
        }
        if len(set(sizes.values())) != 1 or "no rows" in sizes.values():
            listed = ", ".join(f"{path} has {size}" for path, size in sizes.items()) or "nothing"
            raise UnsupportedError(
                f"All arrays of a dataset must have the same number of rows, got: {listed}. Cut or "
                "pad them."
            )
        super().__init__(*tensors)

    def __getitem__(self, index: Any) -> Any:
        return self._tree.build([tensor[index] for tensor in self.tensors])


numpy_dataset = ArrayDataset
