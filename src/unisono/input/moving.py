"""Input that workers of an elastic job read for themselves (FILE, OFF, or from a function).

What only a lost worker had is left out, named in the log and counted. The others go on with what
they have: their new replicas get parts of the input, too, and in the step under way samples that
count nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from unisono.errors import UnsupportedError
from unisono.input.lockstep import Lockstep, Round, State
from unisono.input.placement import PlacedBatch, Placement
from unisono.input.sources import Epoch, Moving
from unisono.input.splits import MISSING, Part, PartQueue, SplitBatch, SplitEpoch, copied, together
from unisono.reductions import ReplicaLayout

# Says how many samples of which workers are left out.
NoteLost = Callable[[Sequence[int], int], None]


class OwnStep:
    """The samples of one step, as workers have read them.

    Args:
        owners: The number of the worker that each replica had.
        counts: How many samples each replica got.
        note_lost: Called when lost workers had some of them.
    """

    def __init__(
        self, owners: tuple[int, ...], counts: tuple[int, ...], note_lost: NoteLost
    ) -> None:
        self._owners = owners
        self._counts = counts
        self._note_lost = note_lost
        self._noted: set[int] = set()

    def counts_for(self, owners: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how many samples each replica has when workers have other replicas.

        Every worker keeps its parts, and its further replicas have samples that count nothing.
        """
        counts: list[int] = []
        for worker in dict.fromkeys(owners):
            pairs = zip(self._owners, self._counts, strict=True)
            had = [count for owner, count in pairs if owner == worker]
            num_missing = owners.count(worker) - len(had)
            counts += had + [0] * num_missing
            if num_missing < 0:
                raise UnsupportedError(
                    "A worker joined the job after this input was taken, so there are fewer "
                    "replicas for it than parts. Take the next input right before its run."
                )
        self._note(owners)
        if not any(counts):
            raise UnsupportedError(
                "A worker was lost, and only it had samples for this run. Use "
                "`AutoShardPolicy.DATA`, with which all workers know all samples."
            )
        return tuple(counts)

    def _note(self, owners: tuple[int, ...]) -> None:
        lost = set(self._owners) - set(owners) - self._noted
        self._noted |= lost
        pairs = zip(self._owners, self._counts, strict=True)
        if num_lost := sum(count for owner, count in pairs if owner in lost):
            self._note_lost(sorted(lost), num_lost)


def filled(values: tuple[Any, ...], num_replicas: int) -> tuple[Any, ...]:
    """Returns the components of a value with copies of the first for further replicas."""
    return values + tuple(copied(values[0]) for _ in range(num_replicas - len(values)))


class MovingLockstep(Lockstep):
    """The steps of a worker that may get other replicas at any time."""

    def __init__(
        self, split: SplitEpoch, job: Moving, placement: Placement, note_lost: NoteLost
    ) -> None:
        epoch = split.epoch
        super().__init__(None, epoch.readers.workers, placement, epoch.progress, split.splitter)
        self._job = job
        self._note_lost = note_lost
        self._queue = PartQueue(split.chunk)
        self._drops_rest = any(source.drops_rest for source in epoch.sources)
        # How many samples this worker has left, and by number what each worker has told about it.
        self._num_left = _num_samples(epoch)
        self.left: dict[int, int | None] = {}

    def _agreed(self) -> PlacedBatch:
        job = self._job
        taken: list[Part] = []
        failure: Exception | None = None
        layout, owners = job.layout, job.owners

        def own() -> list[int]:
            nonlocal failure, layout, owners
            failure, layout, owners = None, job.layout, job.owners
            num_replicas = len(layout.own)
            try:
                taken[:] = self._queue.take(num_replicas)
            except Exception as error:
                failure = error
            if self._drops_rest and len(taken) < num_replicas:
                taken.clear()
            if taken and self._spare is MISSING:
                self._spare, self._tree = self._splitter.spare(taken[0].structure), taken[0].tree
            counts = [part.num_samples for part in taken] + [0] * (num_replicas - len(taken))
            left = -1 if self._num_left is None else self._num_left - sum(counts)
            are_counted = all(part.is_counted for part in taken)
            return [int(self._state(taken or None, failure)), are_counted, left, *counts]

        generation, told = job.tell(own, lambda: self._queue.put_back(taken))
        rows = [told[3 * i + n.start : 3 * (i + 1) + n.stop] for i, n in enumerate(layout.ranges)]
        self._note_left(rows, owners, layout)
        agreed = Round.of([[*row[:2], *row[3:]] for row in rows])
        if State.FAILED in agreed.states:
            self._fail(failure, agreed)
        if agreed.is_last:
            raise StopIteration
        if State.END_UNSEEN in agreed.states:
            self._show()
        num_replicas = len(layout.own)
        if len(taken) < num_replicas and self._spare is MISSING:
            # The workers that had a batch were lost.
            raise StopIteration
        spares = (self._splitter.spare(self._spare) for _ in range(num_replicas - len(taken)))
        parts = together(taken, spares, self._tree)
        step = OwnStep(owners, agreed.counts, self._note_lost)
        parts = replace(parts, counts=agreed.counts, step=step, generation=generation)
        return PlacedBatch(self._now(parts, step), {})

    def _now(self, parts: SplitBatch, step: OwnStep) -> SplitBatch:
        """Returns the parts of the replicas that this worker has now."""
        job = self._job
        if parts.generation == job.generation:
            return parts
        counts, num_replicas = step.counts_for(job.owners), len(job.layout.own)
        leaves = [filled(leaf, num_replicas) for leaf in parts.leaves]
        return replace(parts, leaves=leaves, counts=counts, generation=job.generation)

    def _note_left(
        self, rows: Sequence[Sequence[int]], owners: tuple[int, ...], layout: ReplicaLayout
    ) -> None:
        for row, own in zip(rows, layout.ranges, strict=True):
            self.left[owners[own.start]] = None if row[2] < 0 else row[2]
        own_left = self.left[owners[layout.own.start]]
        self._num_left = own_left

    def _gathered(self, own: Any) -> list[Any]:
        """See `Lockstep._gathered`."""
        gathered: list[Any] = self._job.transact(
            lambda: super(MovingLockstep, self)._gathered(own), _nothing
        )
        return gathered


def _num_samples(epoch: Epoch) -> int | None:
    """Returns how many samples an epoch has on this worker, if that is known."""
    numbers = [source.num_samples for source in epoch.sources]
    return None if None in numbers else sum(number or 0 for number in numbers)


def _nothing() -> None:
    """Undoes what has changed nothing."""
