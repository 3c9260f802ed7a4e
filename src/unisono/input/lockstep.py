"""Workers that read data of their own are kept in step, and end together.

worker 0   0 1   .     .        a worker that has no more gets samples that count nothing
worker 1   0 1   2 3   4        until nobody has any

In an elastic job, what only a lost worker had is left out, named in the log and counted. The others
go on with what they have: their new replicas get parts of the input, too, and in the step under way
samples that count nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unisono.errors import CommunicationError, UnsupportedError
from unisono.input.placement import PlacedBatch, Placement
from unisono.input.prefetch import Steps
from unisono.input.sources.epoch import Progress
from unisono.input.sources.readers import Moving
from unisono.input.splits.splitter import MISSING, SplitBatch, Splitter, copied, grouped
from unisono.input.splits.steps import Part, PartQueue, SplitEpoch, together
from unisono.reductions import Workers
from unisono.values import Tree, map_leaves

# Says how many samples of which workers are left out.
NoteLost = Callable[[Sequence[int], int], None]


class State(enum.IntEnum):
    """What a worker has for the next step."""

    STEP = 0
    # A step that must be replaced by an empty one, and cannot be.
    WHOLE_STEP = 1
    END = 2
    # The end, and it does not know what a batch looks like.
    END_UNSEEN = 3
    FAILED = 4


class Lockstep(Steps[PlacedBatch]):
    """The steps of this worker, one for each step of the others.

    The workers tell each other what they have when the next step is asked for, on the thread that
    asks: collectives are called in one order. A step for which nobody has a sample is left out.
    """

    def __init__(
        self,
        steps: Steps[PlacedBatch] | None,
        workers: Workers,
        placement: Placement,
        progress: Progress,
        splitter: Splitter,
    ) -> None:
        self._steps = steps
        self._workers = workers
        self._placement = placement
        self._progress = progress
        self._splitter = splitter
        self._num_replicas = len(placement.devices)
        self._has_ended = False
        # What a replica gets in a step for which this worker has no samples.
        self._spare: Any = MISSING
        self._tree: Tree | None = None

    def __next__(self) -> PlacedBatch:
        while True:
            placed = self._agreed()
            if any(placed.parts.counts):
                return placed
            self._progress.num_steps += 1
            self._progress.num_left_out += 1

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    def _agreed(self) -> PlacedBatch:
        """Returns the next step of this worker, which counts nothing if only others have one."""
        failure: Exception | None = None
        placed: PlacedBatch | None = None
        try:
            placed = self._own()
        except Exception as error:
            failure = error
        counts, is_counted = (0,) * self._num_replicas, True
        if placed is not None:
            counts, is_counted = placed.parts.counts, placed.parts.is_counted
        own = torch.tensor([self._state(placed, failure), is_counted, *counts])
        counts = self._settle([row.tolist() for row in self._workers.gather(own)], failure)
        if placed is None:
            spares = [self._splitter.spare(self._spare) for _ in range(self._num_replicas)]
            placed = self._placement.place(grouped(spares, counts, self._tree))
        return replace(placed, parts=replace(placed.parts, counts=counts))

    def _settle(self, rows: list[list[int]], failure: Exception | None) -> tuple[int, ...]:
        """Returns how many samples each replica has; at the end, it raises `StopIteration`.

        Args:
            rows: What workers have told: a state, whether samples are counted, and how many.
            failure: Why this worker has failed, if it has.
        """
        states = [row[0] for row in rows]
        if State.FAILED in states:
            self._fail(failure)
        num_steps = states.count(State.STEP) + states.count(State.WHOLE_STEP)
        # Nobody has a step, or one is missing that cannot be empty.
        if num_steps == 0 or (num_steps < len(states) and State.WHOLE_STEP in states):
            raise StopIteration
        if State.END_UNSEEN in states:
            self._show()
        counts = tuple(count for row in rows for count in row[2:])
        if not all(row[1] for row in rows):
            counts = tuple(min(count, 1) for count in counts)
        return counts

    def _own(self) -> PlacedBatch | None:
        if self._has_ended or self._steps is None:
            return None
        try:
            placed = next(self._steps)
        except StopIteration:
            self._has_ended = True
            return None
        if self._spare is MISSING:
            parts = self._placement.hand_out(placed)
            self._spare, self._tree = self._splitter.spare(parts.part(0)), parts.tree
        return placed

    def _state(self, found: object, failure: Exception | None) -> State:
        if failure is not None:
            return State.FAILED
        if found is None:
            return State.END_UNSEEN if self._spare is MISSING else State.END
        return State.WHOLE_STEP if self._spare is MISSING else State.STEP

    def _fail(self, failure: Exception | None) -> None:
        """Raises on every worker if one cannot read: the others would wait for it in vain."""
        reasons = self._gathered(None if failure is None else repr(failure))
        if failure is not None:
            raise failure
        ranks = [rank for rank, reason in enumerate(reasons) if reason is not None]
        listed = ", ".join(f"worker {rank} raised {reasons[rank]}" for rank in ranks)
        raise CommunicationError(
            f"Other workers failed to read their input: {listed}. Check their logs.", ranks
        )

    def _show(self) -> None:
        """Shows those who have never seen a batch what one looks like."""

        def on_host(leaf: Any) -> Any:
            return leaf.cpu() if isinstance(leaf, Tensor) else leaf

        # In a tuple, because None may be a batch, too.
        own = None if self._spare is MISSING else (map_leaves(on_host, self._spare),)
        shown = [batch for batch in self._gathered(own) if batch is not None]
        if self._spare is MISSING and shown:
            (self._spare,) = shown[0]

    def _gathered(self, own: Any) -> list[Any]:
        """Returns what all workers have as `own`, by rank."""
        return self._workers.gather_objects(own)


@dataclass(eq=False)
class OwnStep:
    """The samples of one step, as workers have read them.

    Attributes:
        owners: The number of the worker that each replica had.
        counts: How many samples each replica got.
        note_lost: Called when lost workers had some of them.
    """

    owners: tuple[int, ...]
    counts: tuple[int, ...]
    note_lost: NoteLost
    _noted: set[int] = field(default_factory=set)

    def counts_for(self, owners: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how many samples each replica has when workers have other replicas.

        Every worker keeps its parts, and its further replicas have samples that count nothing.
        """
        counts: list[int] = []
        for worker in dict.fromkeys(owners):
            pairs = zip(self.owners, self.counts, strict=True)
            had = [count for owner, count in pairs if owner == worker]
            num_missing = owners.count(worker) - len(had)
            counts += had + [0] * num_missing
            if num_missing < 0:
                raise UnsupportedError(
                    "A worker joined the job after this input was taken, so there are fewer "
                    "replicas for it than parts. Take the next input right before its run."
                )
        lost = set(self.owners) - set(owners) - self._noted
        self._noted |= lost
        pairs = zip(self.owners, self.counts, strict=True)
        if num_lost := sum(count for owner, count in pairs if owner in lost):
            self.note_lost(sorted(lost), num_lost)
        if not any(counts):
            raise UnsupportedError(
                "A worker was lost, and only it had samples for this run. Use "
                "`AutoShardPolicy.DATA`, with which all workers know all samples."
            )
        return tuple(counts)


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
        numbers = [source.num_samples for source in epoch.sources]
        known = [number for number in numbers if number is not None]
        self._num_left = sum(known) if len(known) == len(numbers) else None
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
        for row, ranks in zip(rows, layout.ranges, strict=True):
            self.left[owners[ranks.start]] = None if row[2] < 0 else row[2]
        self._num_left = self.left[owners[layout.own.start]]
        counts = self._settle([[*row[:2], *row[3:]] for row in rows], failure)
        num_replicas = len(layout.own)
        if len(taken) < num_replicas and self._spare is MISSING:
            # The workers that had a batch were lost.
            raise StopIteration
        spares = (self._splitter.spare(self._spare) for _ in range(num_replicas - len(taken)))
        parts = together(taken, spares, self._tree)
        step = OwnStep(owners, counts, self._note_lost)
        parts = replace(parts, counts=counts, step=step, generation=generation)
        return PlacedBatch(self._now(parts, step), {})

    def _now(self, parts: SplitBatch, step: OwnStep) -> SplitBatch:
        """Returns the parts of the replicas that this worker has now."""
        job = self._job
        if parts.generation == job.generation:
            return parts
        counts, num_replicas = step.counts_for(job.owners), len(job.layout.own)
        leaves = [filled(leaf, num_replicas) for leaf in parts.leaves]
        return replace(parts, leaves=leaves, counts=counts, generation=job.generation)

    def _gathered(self, own: Any) -> list[Any]:
        """See `Lockstep._gathered`."""
        gathered: list[Any] = self._job.transact(
            lambda: super(MovingLockstep, self)._gathered(own), lambda: None
        )
        return gathered
