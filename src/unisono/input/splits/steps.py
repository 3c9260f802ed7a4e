"""How the batches of an epoch become the steps of one worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from unisono.input.sources.epoch import Epoch
from unisono.input.splits.sizes import filled_slices, rotated_sizes, slices_of
from unisono.input.splits.splitter import MISSING, SplitBatch, Splitter, copied, grouped
from unisono.reductions import ReplicaLayout
from unisono.values import Tree


class Part(NamedTuple):
    """What one replica gets.

    Attributes:
        structure: Its samples.
        tree: How they are structured.
        num_samples: How many there are.
        is_counted: Whether that is known; otherwise the part counts as one.
    """

    structure: Any
    tree: Tree
    num_samples: int
    is_counted: bool


class PartQueue:
    """The parts of this worker that are still to be used. `draw` raises `StopIteration`."""

    def __init__(self, draw: Callable[[], SplitBatch]) -> None:
        self._draw = draw
        self._parts: deque[Part] = deque()
        self._has_ended = False

    def take(self, num_parts: int) -> list[Part]:
        """Returns the next parts: fewer at the end."""
        while len(self._parts) < num_parts and not self._has_ended:
            try:
                drawn = self._draw()
            except StopIteration:
                self._has_ended = True
            else:
                self._parts.extend(
                    Part(drawn.part(i), drawn.tree, count, drawn.is_counted)
                    for i, count in enumerate(drawn.counts)
                )
        return [self._parts.popleft() for _ in range(min(num_parts, len(self._parts)))]

    def put_back(self, parts: Sequence[Part]) -> None:
        """Undoes `take`."""
        self._parts.extendleft(reversed(parts))


def together(parts: Sequence[Part], spares: Iterable[Any], tree: Tree | None = None) -> SplitBatch:
    """Returns the input of a step: parts, and spares of structure `tree` that count nothing."""
    if parts:
        tree = parts[0].tree if all(part.tree == parts[0].tree for part in parts) else None
    lent = list(spares)
    counts = (*(part.num_samples for part in parts), *(0 for _ in lent))
    return grouped([*(part.structure for part in parts), *lent], counts, tree)


class SplitEpoch(ABC):
    """One epoch, whose batches are split over the replicas step by step."""

    def __init__(self, epoch: Epoch, splitter: Splitter) -> None:
        self.epoch = epoch
        self.splitter = splitter

    @abstractmethod
    def draw(self) -> SplitBatch:
        """Draws the batches of the next step and splits them. Raises `StopIteration` at the end."""

    def chunk(self) -> SplitBatch:
        """Draws as little as can be drawn, for replicas that may be others in the next step."""
        return self.draw()


class WholeBatches(SplitEpoch):
    """Each batch is that of the one replica there is."""

    def draw(self) -> SplitBatch:
        return self.splitter.whole(next(self.epoch.batches[0]))


class SharedBatches(SplitEpoch):
    """All workers draw the same batches, and each keeps the parts of its replicas.

    It `keeps_all` parts if it may get other replicas.
    """

    def __init__(
        self, epoch: Epoch, splitter: Splitter, layout: ReplicaLayout, *, keeps_all: bool = False
    ) -> None:
        super().__init__(epoch, splitter)
        self._own = slice(None) if keeps_all else slice(layout.own.start, layout.own.stop)
        self._num_parts = layout.total

    def draw(self) -> SplitBatch:
        return self.splitter.split(next(self.epoch.batches[0]), self._num_parts, self._own)


class OwnBatches(SplitEpoch):
    """A worker's own batches. Each is split into one part per replica of all workers.

    With equal numbers of replicas, a batch lasts for as many steps as there are workers. Otherwise
    a step may use the last parts of one batch and the first of the next.

    As TensorFlow splits, all batches are split as a full one is, and a shorter one fills its parts
    in order. The first batch of the first epoch says what a full one is, unless the source does.
    """

    def __init__(self, epoch: Epoch, splitter: Splitter, layout: ReplicaLayout) -> None:
        super().__init__(epoch, splitter)
        self._num_replicas = len(layout.own)
        self._place = layout.total, layout.own.start
        progress = epoch.progress
        if progress.batch_size is None:
            progress.batch_size = epoch.sources[0].batch_size
        # An epoch may be resumed in the middle of a batch.
        self._to_skip = progress.num_steps * self._num_replicas % layout.total
        self._queue = PartQueue(self.chunk)

    def _slices(self, num_samples: int) -> tuple[slice, ...]:
        if not self.splitter.leaves_empty:
            return slices_of(rotated_sizes(num_samples, *self._place))
        progress = self.epoch.progress
        progress.batch_size = progress.batch_size or num_samples
        full = max(progress.batch_size, num_samples)
        return filled_slices(num_samples, rotated_sizes(full, *self._place))

    def chunk(self) -> SplitBatch:
        batch = next(self.epoch.batches[0])
        parts = self.splitter.split(batch, self._place[0], slices=self._slices)
        first, self._to_skip = self._to_skip, 0
        return parts.of(slice(first, None)) if first else parts

    def draw(self) -> SplitBatch:
        step = self._num_replicas
        taken = self._queue.take(step)
        if not taken:
            raise StopIteration
        spare = self.splitter.spare(taken[0].structure) if len(taken) < step else None
        if spare is MISSING:
            raise StopIteration
        return together(taken, (copied(spare) for _ in range(step - len(taken))))


class BatchPerReplica(SplitEpoch):
    """Each replica gets a whole batch; in the last step some may have to do without."""

    def chunk(self) -> SplitBatch:
        parts = self.splitter.join([next(self.epoch.batches[0])])
        assert parts is not None
        return parts

    def draw(self) -> SplitBatch:
        per_step = self.epoch.progress.batches_per_step
        drawn = [next(batches, MISSING) for batches in self.epoch.batches for _ in range(per_step)]
        num_missing = sum(batch is MISSING for batch in drawn)
        drops_rest = any(source.drops_rest for source in self.epoch.sources)
        if num_missing == len(drawn) or (num_missing and drops_rest):
            raise StopIteration
        parts = self.splitter.join(drawn)
        if parts is None:
            raise StopIteration
        return parts
