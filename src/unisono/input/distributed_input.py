"""`DistributedInput`: what all distributed datasets do."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unisono.devices import Device
from unisono.errors import UnsupportedError
from unisono.input.iterator import DistributedIterator
from unisono.input.options import InputContext, InputOptions
from unisono.input.place import Placement
from unisono.input.source.epoch import Epoch, Progress, Readers
from unisono.input.source.random_state import random_state, set_random_state
from unisono.input.source.sources import Source
from unisono.input.split.layout import lay_out
from unisono.input.split.splitter import Draw, Splitter
from unisono.reductions import ReplicaLayout, Workers
from unisono.values import PerReplica

if TYPE_CHECKING:
    from unisono.workers.elastic import ElasticJob

_log = logging.getLogger("unisono")


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor of the input.

    Attributes:
        shape: Its shape, with None where the size may differ from step to step.
        dtype: Its dtype.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype


def layout_of(workers: Workers | None, context: InputContext, num_local: int) -> ReplicaLayout:
    """Returns which replicas each worker has, where this one has `num_local`."""
    if workers is not None and workers.are_many:
        return workers.layout(num_local)
    return ReplicaLayout((num_local,) * context.num_input_pipelines, context.input_pipeline_id)


class DistributedInput:
    """What all distributed datasets do: iterate, and save and resume in the middle of an epoch.

    In each step batches are drawn from all `sources`, which were made of what was `given`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        given: Sequence[Any],
        devices: Sequence[Device],
        input_context: InputContext,
        options: InputOptions,
        readers: Readers,
        job: ElasticJob | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self._given = tuple(given)
        self._context = input_context
        self.options = options
        self._readers = readers
        self.job = job
        to_devices = (
            options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
        )
        self.placement = Placement(devices, to_devices=to_devices, job=job)
        self._progress = Progress(
            batches_per_step=self.batches_per_step, steps_per_batch=self.steps_per_batch
        )
        self._pending: tuple[Progress, bool] | None = None
        self._latest: Callable[[], DistributedIterator | None] = lambda: None
        self._num_lost = 0
        # In an elastic job, which worker each replica has, and had when the sources were made.
        self._owners = self._made_owners = () if job is None else job.owners
        if job is not None:
            job.add_input(self)

    def _move(self, devices: Sequence[Device], input_context: InputContext) -> None:
        """In an elastic job: this worker has other replicas from now on, among other workers."""
        self.placement.move(devices)
        self._context = input_context
        if self.job is not None and self._readers.are_apart:
            before, self._owners = self._owners, self.job.owners
            for worker in sorted(set(before) - set(self._owners)):
                self._tell_of(worker)

    @property
    def is_read_apart(self) -> bool:
        """Whether workers of an elastic job are amid an epoch that each reads for itself."""
        latest = self._latest()
        return latest is not None and latest.left is not None

    def _tell_of(self, worker: int) -> None:
        """Names and counts what only a worker had that was lost."""
        latest = self._latest()
        left = None if latest is None else latest.left
        # Before the first step of an epoch, nobody has told how many samples there are.
        num_left = 0 if left is None else left.get(worker)
        named, later, is_for_good = self._data_of(worker)
        if num_left != 0:
            self._num_lost += num_left or 0
            number = "An unknown number of" if num_left is None else num_left
            _log.warning(
                f"{number} samples of this epoch{named} are left out, because only worker {worker} "
                f"read them. {later}"
            )
        elif is_for_good:
            _log.warning(f"The data of worker {worker} is left out. {later}")

    def _data_of(self, worker: int) -> tuple[str, str, bool]:
        """Says of a lost worker what it read, as far as this one knows, what becomes of that in the
        next epoch, and whether it is lost for good.
        """
        later = (
            "In the next epoch, the function is called again for the workers that there are then."
        )
        return "", later, False

    def _note_lost(self, workers: Sequence[int], num_samples: int) -> None:
        """When lost workers had samples of the step under way."""
        self._num_lost += num_samples
        _log.warning(
            "%d samples of this step are left out, because only worker%s %s had read them.",
            num_samples,
            "s"[: len(workers) - 1],
            ", ".join(map(str, workers)),
        )

    @property
    def num_lost_samples(self) -> int:
        """How many samples an elastic job has left out, because only lost workers had them.

        With the policies `FILE` and `OFF` and with an input function, each worker reads for itself.
        Samples are counted where a lost worker had said how many it has.
        """
        return self._num_lost

    @property
    def layout(self) -> ReplicaLayout:
        """Which replicas each worker has."""
        return layout_of(self._readers.workers, self._context, len(self.placement.devices))

    @property
    def is_wrapped(self) -> bool:
        """Whether elements hold `PerReplica` values. They do unless there is only one replica."""
        return self._context.num_input_pipelines > 1 or len(self.placement.devices) > 1

    @property
    def element_spec(self) -> Any:
        """The structure of an element, with a `TensorSpec` in the place of each tensor.

        As in an element, they are in `PerReplica` values unless there is only one replica. The
        size of the batch is None unless incomplete batches are dropped, so that it never differs.
        One sample is read for it, with the random generators set back afterwards.

        Raises:
            UnsupportedError: If the input gives its batches once, or is split by a function.
        """
        if callable(self.options.split):
            raise UnsupportedError(
                "`element_spec` is not known because your `split` function makes the parts. Take "
                "the first element, and read the shapes and dtypes of its tensors."
            )
        before = random_state(())
        try:
            layout = lay_out(self._sources[0].example(), self.options.batch_dim)
        finally:
            set_random_state(before, ())
        pairs = zip(layout.leaves, layout.dims, strict=True)
        specs = [_spec(leaf, dim, self.static_batch_size) for leaf, dim in pairs]
        if self.is_wrapped:
            devices = self.placement.devices
            specs = [PerReplica.placed((spec,) * len(devices), devices) for spec in specs]
        return layout.tree.build(specs)

    @property
    def static_batch_size(self) -> int | None:
        """The number of samples that each replica gets in every step, if that is always so."""
        source = self._sources[0]
        return source.batch_size if source.drops_rest else None

    @property
    def takes_batch_per_replica(self) -> bool:
        """Whether each source gives a batch per replica of this worker, and not one, in a step."""
        return False

    @property
    def batches_per_step(self) -> int:
        """How many batches each source gives in `steps_per_batch` steps."""
        return len(self.layout.own) if self.takes_batch_per_replica else 1

    @property
    def batches_by_worker(self) -> int | list[int]:
        """How many batches each source gives in a step, on each worker if they differ."""
        are_equal = self.layout.are_equal or not self.takes_batch_per_replica
        return self.batches_per_step if are_equal else list(self.layout.counts)

    @property
    def steps_per_batch(self) -> int:
        """Over how many steps each batch is split."""
        return 1

    def steps(self, epoch: Epoch, splitter: Splitter) -> Draw:
        """Returns what draws the batches of the next step and splits them over the replicas."""
        raise NotImplementedError

    def parts(self, epoch: Epoch, splitter: Splitter) -> Draw:
        """Returns what draws as little as can be drawn of data that workers read for themselves."""
        raise NotImplementedError

    def __iter__(self) -> DistributedIterator:
        (saved, refetch), self._pending = self._pending or (None, True), None
        iterator = DistributedIterator(self, self.open(saved, refetch=refetch))
        self._latest = weakref.ref(iterator)
        return iterator

    def open(self, saved: Progress | None = None, *, refetch: bool = True) -> Epoch:
        """Begins an epoch, where another one was saved if that was under way."""
        if saved is not None and saved.at_start is not None:
            self._check_steps(saved)
            self._leave_latest()
            epoch = Epoch.resume(self._sources, self._readers, saved, refetch=refetch)
        else:
            self._leave_latest()
            if self._made_owners != self._owners:
                self._made_owners = self._owners
                self._sources = self._sources_again()
            epoch = Epoch.begin(self._sources, self._readers, self._progress.anew())
        self._progress = epoch.progress
        return epoch

    def _check_steps(self, saved: Progress) -> None:
        if saved.batches_per_step != self.batches_per_step:
            raise UnsupportedError(
                f"The saved state is of an input with {saved.batches_per_step} batches per "
                f"step, but this one takes {self.batches_per_step}. Resume with the same number of "
                "replicas."
            )
        if saved.steps_per_batch != self.steps_per_batch:
            raise UnsupportedError(
                f"The saved state is of an input with {saved.steps_per_batch} steps per batch, "
                f"but this one makes {self.steps_per_batch}. Resume with the same policy and the "
                "same number of workers."
            )

    def _leave_latest(self) -> None:
        """Stops an older epoch from drawing where the next one is about to."""
        latest = self._latest()
        if latest is not None and any(source.has_one_epoch for source in self._sources):
            latest.close()

    def _sources_again(self) -> tuple[Source, ...]:
        """In an elastic job whose workers have changed: returns what this worker reads now."""
        return self._sources

    if TYPE_CHECKING:
        dataset: Any
        batch_size: int | None
        sampler: Any
        batch_sampler: Any
        drop_last: bool
    else:

        def __getattr__(self, name: str) -> Any:
            """What programs ask a `DataLoader` for: `dataset`, `batch_size`, `sampler` and so on.

            It is that of the loader, with the batch size that it was made with.
            """
            loader = self.__dict__.get("_given", (None,))[0]
            if name.startswith("_") or not isinstance(loader, DataLoader):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Returns how far the latest epoch is: its steps, and the random state that it began with.

        What was fetched ahead but not handed out does not count. `torch.save` takes it.

        Raises:
            UnsupportedError: If workers of an elastic job read for themselves.
        """
        return self._saved(self._pending[0] if self._pending else self._progress)

    def _saved(self, progress: Progress) -> dict[str, Any]:
        """Returns a progress as it is saved: what one worker saves serves all."""
        self.check_known()
        return {**progress.state_dict(), "batches_per_step": self.batches_by_worker}

    def _loaded(self, state: Mapping[str, Any]) -> Progress:
        self.check_known()
        found = state.get("batches_per_step") if isinstance(state, Mapping) else None
        if isinstance(found, (list, tuple)):
            if list(found) != self.batches_by_worker:
                raise UnsupportedError(
                    f"The saved state is of workers that take {list(found)} batches per step, but "
                    f"these take {self.batches_by_worker}. Resume with the same numbers of "
                    "replicas."
                )
            state = {**state, "batches_per_step": self.batches_per_step}
        return Progress.from_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any], *, refetch: bool = True) -> None:
        """Makes the next epoch go on where another one was saved.

        The sampler's order is replayed, what was consumed is skipped, and the global random
        generators are left alone: with their state restored as well, and the same input, the
        rest of the epoch gives the same bits. Without workers a map-style `DataLoader` fetches
        nothing to get there; other inputs are drawn and dropped.

        Args:
            state: What `state_dict` returned.
            refetch: Whether a `DataLoader` with workers draws and drops too, so that random
                transforms in the workers give the same bits. Turned off, its sampler skips at once.
        """
        progress = self._loaded(state)
        self._pending = None if progress.at_start is None else (progress, refetch)
        self._progress = self._progress.anew()

    def check_known(self) -> None:
        """Raises if workers of an elastic job read for themselves."""
        if self.job is not None and self._readers.are_apart:
            raise UnsupportedError(
                "With `elastic=True`, the position in an input that each worker reads for itself "
                "can be neither saved nor loaded: the workers may change. Leave the input out of "
                "the checkpoint, or use `AutoShardPolicy.DATA`."
            )

    def _num_batches(self) -> list[int]:
        """Returns how many batches each source gives, if that says how many steps there are."""
        if self._readers.are_apart:
            raise TypeError(
                "Each worker reads its own data, so the number of steps is known only when all of "
                "them have reached the end. Iterate without `len()`."
            )
        return [len(source) for source in self._sources]


def _spec(leaf: Any, batch_dim: int | None, batch_size: int | None) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    shape: list[int | None] = list(leaf.shape)
    if batch_dim is not None:
        shape[batch_dim] = batch_size
    return TensorSpec(tuple(shape), leaf.dtype)
