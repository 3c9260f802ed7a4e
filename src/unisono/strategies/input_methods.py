"""What a strategy does with input, under the names of all versions of `tf.distribute`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.arguments import check_callable, check_optional, in_words
from unisono.errors import UnsupportedError
from unisono.input import (
    ArrayDataset,
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
    numpy_dataset,
)

if TYPE_CHECKING:
    from unisono.input import DistributedDatasetsFromFunction
    from unisono.strategies.extended import StrategyExtended


class InputMethods:
    """The part of a strategy that distributes input."""

    _extended: StrategyExtended
    run: Callable[..., Any]
    _check_cross_replica: Callable[..., None]

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Splits the batches of a `DataLoader`, or of any iterable, over the replicas.

        The batch size is the global one. Each step gives the structure of a batch with `PerReplica`
        leaves; with one replica, the batch itself. A batch that does not divide is split as evenly
        as possible. If it has fewer samples than there are replicas, the last replicas get a copy
        of a sample that counts nothing; see `InputOptions.split`. The result has the attributes of
        the `DataLoader`, such as `dataset` and `batch_size`.

        Args:
            dataset: A `DataLoader`, or any iterable of batches.
            options: How batches are fetched. Many workers read the same batches and each keeps its
                part, unless their `auto_shard_policy` says that each has its own data.

        Returns:
            An iterable, which can be iterated as often as `dataset` can.
        """
        return DistributedDataset(
            dataset,
            self._extended.worker_devices,
            options,
            input_context=self._input_context,
            workers=self._extended.workers,
            job=self._extended.elastic,
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDatasetsFromFunction:
        """Distributes batches of per-replica size that `dataset_fn(input_context)` makes.

        Args:
            dataset_fn: Called once on each worker, or once for each replica if the options say so.
                Returns a `DataLoader` or an iterable of batches, of whatever data it likes; the
                `InputContext` says which part is this worker's. Each replica gets a batch per step.
                In an elastic job whose workers have changed, it is called again before the next
                epoch.
            options: How batches are fetched.

        Returns:
            An iterable of the inputs of each step.
        """
        from unisono.input import DistributedDatasetsFromFunction

        return DistributedDatasetsFromFunction(
            dataset_fn,
            self._input_context,
            self._extended.worker_devices,
            options,
            workers=self._extended.workers,
            job=self._extended.elastic,
        )

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Calls `value_fn(value_context)` for each replica of this worker, in order.

        In an elastic job it is called for all replicas, as this worker may get others.

        Args:
            value_fn: Returns the value of one replica. The context that it is given has the number
                of the replica and says how many there are.

        Returns:
            The structure of a value with `PerReplica` leaves, also where there is one replica.
        """
        from unisono.input import values_from_function

        layout, job = self._extended.layout, self._extended.elastic
        contexts = [ValueContext(replica, layout.total) for replica in range(layout.total)]
        own = slice(layout.own.start, layout.own.stop)
        if job is None:
            return values_from_function(value_fn, self._extended.worker_devices, contexts[own])
        return values_from_function(
            value_fn, self._extended.worker_devices, contexts, own=own, generation=job.generation
        )

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: object = None
    ) -> ArrayDataset:
        """Makes a dataset of the rows of `numpy_input`, an array or a nested structure of arrays.

        `session` is taken for the sake of `tf.distribute`, and left alone.
        """
        return numpy_dataset(numpy_input)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """Returns an iterator over `dataset`, distributed; its `initialize()` restarts it.

        See `experimental_distribute_dataset`.
        """
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """Returns an iterator over what `input_fn(input_context)` makes, once on each worker.

        See `distribute_datasets_from_function`.

        Raises:
            UnsupportedError: If `replication_mode` is not `PER_WORKER`.
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise UnsupportedError(
                f"`replication_mode` must be {InputReplicationMode.PER_WORKER}, got "
                f"{in_words(replication_mode)}."
            )
        check_callable("input_fn", input_fn)
        return iter(self.distribute_datasets_from_function(input_fn))

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: DistributedIterator | None = None
    ) -> Any:
        """Runs `fn` on every replica, with the next element of `input_iterator` as its argument.

        Without an iterator it has no argument. See `run`.
        """
        self._check_cross_replica("experimental_run()")
        wanted = "a distributed iterator"
        check_optional("input_iterator", input_iterator, DistributedIterator, wanted)
        args = () if input_iterator is None else (input_iterator.get_next(),)
        return self.run(fn, args=args)

    @property
    def _input_context(self) -> InputContext:
        workers = self._extended.workers
        return InputContext(workers.size, workers.rank, self._extended.num_replicas_in_sync)
