"""`DistributedIterator`: hands out one step after another, and knows how far it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.contexts import current_replica
from unisono.errors import ContextError, EndOfInputError
from unisono.input.prefetch import Prefetcher
from unisono.input.source.epoch import Epoch, Progress
from unisono.input.split.reader import Reader
from unisono.input.split.splitter import SplitBatch, Splitter
from unisono.tracing import span

if TYPE_CHECKING:
    from unisono.input.distributed_input import DistributedInput
    from unisono.input.split.own_data import MovingLockstep


@dataclass(frozen=True)
class OptionalElement:
    """The input of a step, or the news that there is none."""

    _elements: tuple[Any, ...] = ()

    def has_value(self) -> bool:
        """Whether there is a step."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """Returns the input of the step, which must be there."""
        if not self._elements:
            raise EndOfInputError(
                "This optional has no value, because the input has ended. Call `has_value()` first."
            )
        return self._elements[0]


class DistributedIterator(Iterator[Any]):
    """One epoch over a distributed dataset.

    Each element has the structure of a batch, with a `PerReplica` in the place of each leaf that
    is not None; a single replica gets the bare batch.

    Args:
        dataset: Whose epoch it is; it makes the iterator when it is iterated.
        epoch: The batches of this epoch.
    """

    def __init__(self, dataset: DistributedInput, epoch: Epoch) -> None:
        self._dataset = dataset
        self._take(epoch)

    def _take(self, epoch: Epoch) -> None:
        """Puts the stages together: source, split, place, prefetch.

        Workers that read their own data go in lockstep after that.
        """
        dataset, placement = self._dataset, self._dataset.placement
        self._epoch = epoch
        self._counts: tuple[int, ...] = ()
        self._has_ended = False
        self._prefetcher: Prefetcher[SplitBatch] | None = None
        self._steps: Iterator[SplitBatch]
        self._moving: MovingLockstep | None = None
        # All that the sources know of their batches helps to find the samples.
        known = [one.batch_size_after(epoch.progress.num_consumed) for one in epoch.sources]
        sizes = [size for size in known if size is not None]
        are_stacked = all(source.stacks_samples for source in epoch.sources)
        reader = Reader(dataset.options.batch_dim, sizes, are_stacked=are_stacked)
        splitter = Splitter(dataset.options, reader)
        if epoch.readers.are_apart and dataset.job is not None:
            from unisono.input.split.own_data import MovingLockstep

            # Nothing is drawn ahead, because this worker may get other replicas.
            own, job, note_lost = dataset.parts(epoch, splitter), dataset.job, dataset._note_lost
            self._moving = MovingLockstep(own, epoch, splitter, placement, job, note_lost)
            self._steps = self._moving
            return
        size = dataset.options.experimental_per_replica_buffer_size
        # Drawing ahead must change no random number, unless the options insist. Workers that read
        # the same would draw other numbers each, and so lose samples.
        insists = size > 1 and not epoch.readers.draw_alike
        is_ahead = insists or all(source.is_alone for source in epoch.sources)
        steps = dataset.steps(epoch, splitter)

        def draw() -> SplitBatch:
            # On any thread. It does not keep this iterator alive.
            with span("input", "fetch"):
                parts = steps()
            with span("input", "place"):
                return placement.place(parts)

        self._steps = self._prefetcher = Prefetcher(draw, size if is_ahead else 0)
        if epoch.readers.are_apart:
            from unisono.input.split.own_data import Lockstep

            self._steps = Lockstep(self._prefetcher.__next__, epoch, splitter, placement)

    @property
    def element_spec(self) -> Any:
        """What the elements look like; see `DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    @property
    def last_counts(self) -> tuple[int, ...]:
        """How many samples each replica, of all workers, got in the step handed out last.

        Where batches do not show how many samples they hold, each counts as one.
        """
        return self._counts

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return self._epoch.progress

    def __next__(self) -> Any:
        if current_replica() is not None:
            raise ContextError(
                "The next input was requested on a replica. Take it outside `run`, and pass it as "
                "an argument."
            )
        if self._has_ended:
            raise StopIteration
        if self._dataset.job is not None:
            self._dataset.job.at_boundary(self._dataset)
        self._epoch.note_first_draw()
        try:
            with span("input", "next"):
                parts = next(self._steps)
        except StopIteration:
            self.close()
            # A finished epoch cannot be resumed: the next one starts at the beginning.
            self.progress.at_start = None
            raise
        except Exception:
            # What could not be read was drawn all the same.
            self.progress.num_steps += 1
            raise
        self.progress.num_steps += 1
        placement = self._dataset.placement
        parts = placement.hand_out(parts)
        self._counts = parts.counts
        return parts.distributed(placement.devices) if self._dataset.is_wrapped else parts.part(0)

    def get_next(self) -> Any:
        """Returns the next step's input.

        Raises:
            EndOfInputError: If the epoch is over.
        """
        try:
            return next(self)
        except StopIteration:
            num_steps = self.progress.num_steps - self.progress.num_left_out
            raise EndOfInputError(
                f"The input has ended after {num_steps} steps. Iterate over the dataset again to "
                "start over, or call `initialize()`."
            ) from None

    def get_next_as_optional(self) -> OptionalElement:
        """Returns the next step's input if there is one."""
        try:
            return OptionalElement((next(self),))
        except StopIteration:
            return OptionalElement()

    def initialize(self) -> None:
        """Starts the epoch again. Before the first step it does nothing."""
        if self._has_ended or self.progress.at_first is not None:
            self.close()
            self._take(self._dataset.open())

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch; see `DistributedDataset.state_dict`."""
        return self._dataset._saved(self.progress)

    def load_state_dict(self, state: Mapping[str, Any], *, refetch: bool = True) -> None:
        """Continues where another iterator was; see `DistributedDataset.load_state_dict`."""
        saved = self._dataset._loaded(state)
        self.close()
        self._take(self._dataset.open(saved, refetch=refetch))

    @property
    def left(self) -> dict[int, int | None] | None:
        """How many samples each worker of an elastic job has left that it reads for itself.

        None where workers read the same, or have come to the end.
        """
        return None if self._moving is None or self._has_ended else self._moving.left

    def close(self) -> None:
        """Ends the epoch early and stops fetching ahead."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._has_ended = True
