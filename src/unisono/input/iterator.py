"""`DistributedIterator`: hands out one step after another, and knows how far it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.contexts import current_replica
from unisono.errors import ContextError, EndOfInputError
from unisono.input.context import InputOptions
from unisono.input.in_step import InStep
from unisono.input.passes import Pass, Progress
from unisono.input.placement import Placed, Placement
from unisono.input.prefetch import Drawn, ReadAhead
from unisono.input.splitting import Parts, Splitter
from unisono.tracing import span


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
            raise EndOfInputError("The input has ended; call `has_value` first.")
        return self._elements[0]


class Deal(ABC):
    """One pass, split step by step.

    Args:
        opened: The pass.
        splitter: Makes the parts of the replicas.
    """

    def __init__(self, opened: Pass, splitter: Splitter) -> None:
        self.opened = opened
        self.splitter = splitter

    @abstractmethod
    def draw(self) -> Parts:
        """Draws the batches of the next step and deals them. Raises `StopIteration` at the end."""


class Dealt(ABC):
    """Input that can be split over the replicas of this host, pass by pass."""

    @property
    @abstractmethod
    def options(self) -> InputOptions:
        """How it is fetched."""

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """Where the parts go."""

    @property
    @abstractmethod
    def is_wrapped(self) -> bool:
        """Whether elements hold `PerReplica` values. They do unless there is only one replica."""

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """What its elements look like."""

    @abstractmethod
    def begin(self) -> Deal:
        """Begins a pass."""

    @abstractmethod
    def resume(self, progress: Progress, *, refetch: bool) -> Deal:
        """Begins a pass where another one was saved."""


class DistributedIterator(Iterator[Any]):
    """One pass over a distributed dataset.

    Each element has the structure of a batch, with a `PerReplica` in the place of each leaf that
    is not None; a single replica gets the bare batch.

    Args:
        dataset: Whose pass it is; it makes the iterator when it is iterated.
        deal: How the batches of this pass are split.
    """

    def __init__(self, dataset: Dealt, deal: Deal) -> None:
        self._dataset = dataset
        self._take(deal)

    def _take(self, deal: Deal) -> None:
        self._opened = deal.opened
        self._counts: tuple[int, ...] = ()
        self._steps = _steps(deal, self._dataset)
        self._has_ended = False

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
        return self._opened.progress

    def __next__(self) -> Any:
        if current_replica() is not None:
            raise ContextError(
                "The next input was asked for on a replica. Take it outside of `run`, and pass it "
                "as an argument."
            )
        if self._has_ended:
            raise StopIteration
        progress = self._opened.progress
        self._opened.note_first_draw()
        try:
            with span("input", "next"):
                placed = next(self._steps)
        except StopIteration:
            self._end()
            raise
        except Exception:
            # What could not be read was drawn all the same.
            progress.num_steps += 1
            raise
        progress.num_steps += 1
        placement = self._dataset.placement
        parts = placement.hand_out(placed)
        self._counts = parts.counts
        return parts.distributed(placement.devices) if self._dataset.is_wrapped else parts.part(0)

    def get_next(self) -> Any:
        """Returns the next step's input.

        Raises:
            EndOfInputError: If the pass is over.
        """
        try:
            return next(self)
        except StopIteration:
            num_steps = self.progress.num_steps - self.progress.num_left_out
            raise EndOfInputError(
                f"The input has ended after {num_steps} steps. Call `initialize` or iterate the "
                "dataset again to start over."
            ) from None

    def get_next_as_optional(self) -> OptionalElement:
        """Returns the next step's input if there is one."""
        try:
            return OptionalElement((next(self),))
        except StopIteration:
            return OptionalElement()

    def initialize(self) -> None:
        """Starts over. Before the first step there is nothing to do."""
        if self._has_ended or self._opened.progress.at_first is not None:
            self.close()
            self._take(self._dataset.begin())

    def state_dict(self) -> dict[str, Any]:
        """Returns how far the pass is; see `DistributedDataset.state_dict`."""
        return self.progress.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, refetch: bool = True) -> None:
        """Goes to where another iterator was; see `DistributedDataset.load_state_dict`."""
        progress = Progress.from_state_dict(state)
        self.close()
        self._take(
            self._dataset.begin()
            if progress.at_start is None
            else self._dataset.resume(progress, refetch=refetch)
        )

    def close(self) -> None:
        """Ends the pass early and stops fetching ahead."""
        self._steps.close()
        self._has_ended = True

    def _end(self) -> None:
        self.close()
        # A finished pass cannot be resumed: the next one starts at the beginning.
        self._opened.progress.at_start = None


def _steps(deal: Deal, dataset: Dealt) -> Drawn[Placed]:
    """Draws ahead where that changes no random number, or where the options insist."""
    placement = dataset.placement

    def draw() -> Placed:
        with span("input", "fetch"):
            parts = deal.draw()
        with span("input", "place"):
            return placement.place(parts)

    size = dataset.options.experimental_per_replica_buffer_size
    opened = deal.opened
    is_alone = all(source.is_alone for source in opened.sources)
    is_ahead = size > 1 or (size == 1 and is_alone)
    steps = ReadAhead(draw, size) if is_ahead else Drawn(draw)
    if opened.readers.are_apart:
        workers = opened.readers.workers
        return InStep(steps, workers, placement, opened.progress, deal.splitter)
    return steps
