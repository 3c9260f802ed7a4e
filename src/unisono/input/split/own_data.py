"""Workers that each read their own data: batches become parts, and all workers end together.

worker 0   0 1   .     .        a worker that has no more gets samples that count nothing
worker 1   0 1   2 3   4        until nobody has any

In an elastic job, what only a lost worker had is left out, named in the log and counted. The others
go on with what they have: their new replicas get parts of the input, too, and in the step under way
samples that count nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from unisono.errors import CommunicationError, UnsupportedError
from unisono.input.place import Placement, arrived
from unisono.input.source.epoch import Epoch
from unisono.input.split.splitter import (
    MISSING,
    Draw,
    SplitBatch,
    Splitter,
    copied,
    filled_slices,
    grouped,
    rotated_sizes,
    slices_of,
)
from unisono.reductions import ReplicaLayout
from unisono.values import Tree, map_leaves

if TYPE_CHECKING:
    from unisono.workers.elastic import ElasticJob

# Says how many samples of which workers are left out.
NoteLost: TypeAlias = Callable[[Sequence[int], int], None]
# What a worker tells before its counts: whether it failed, has parts for the next step, has a spare
# for a replica without samples, and has counted its samples.
_NUM_FLAGS = 4


def parts_of_batches(epoch: Epoch, splitter: Splitter, layout: ReplicaLayout) -> Draw:
    """Returns what draws a batch of this worker, split into one part per replica of all workers.

    As TensorFlow splits, all batches are split as a full one is, and a shorter one fills its parts
    in order. The first batch of the first epoch says what a full one is, unless the source does.
    """
    progress, first = epoch.progress, layout.own.start
    if progress.batch_size is None:
        progress.batch_size = epoch.sources[0].batch_size
    # An epoch may be resumed in the middle of a batch.
    to_skip = progress.num_steps * len(layout.own) % layout.total

    def slices(num_samples: int) -> tuple[slice, ...]:
        if not splitter.leaves_empty:
            return slices_of(rotated_sizes(num_samples, layout.total, first))
        progress.batch_size = progress.batch_size or num_samples
        full = max(progress.batch_size, num_samples)
        return filled_slices(num_samples, rotated_sizes(full, layout.total, first))

    def draw() -> SplitBatch:
        nonlocal to_skip
        parts = splitter.split(next(epoch.batches[0]), layout.total, slices=slices)
        used, to_skip = to_skip, 0
        return parts.of(slice(used, None))

    return draw


class PartQueue:
    """The parts of this worker that are still to be used.

    With equal numbers of replicas, a batch lasts for as many steps as there are workers. Otherwise
    a step may use the last parts of one batch and the first of the next.
    """

    def __init__(self, draw: Draw, splitter: Splitter, *, drops_rest: bool = False) -> None:
        self._draw = draw
        self._splitter = splitter
        self._drops_rest = drops_rest
        self._drawn: deque[SplitBatch] = deque()
        self._taken: list[SplitBatch] = []
        self._has_ended = False

    def take(self, num_parts: int) -> SplitBatch:
        """Returns the next parts. At the end some of them are spares, which count nothing."""
        self._taken = []
        while sum(len(one.counts) for one in self._drawn) < num_parts and not self._has_ended:
            try:
                self._drawn.append(self._draw())
            except StopIteration:
                self._has_ended = True
        num_missing = num_parts
        while num_missing and self._drawn:
            first = self._drawn.popleft()
            taken, rest = first.of(slice(num_missing)), first.of(slice(num_missing, None))
            if rest.counts:
                self._drawn.appendleft(rest)
            self._taken.append(taken)
            num_missing -= len(taken.counts)
        return self._together(num_missing)

    def _together(self, num_missing: int) -> SplitBatch:
        taken = self._taken
        if not taken or (num_missing and self._drops_rest):
            raise StopIteration
        if len(taken) == 1 and not num_missing:
            return taken[0]
        parts = [one.part(i) for one in taken for i in range(len(one.counts))]
        counts = [count for one in taken for count in one.counts]
        if num_missing:
            spare = self._splitter.spare(parts[0], counts[0])
            if spare is MISSING:
                raise StopIteration
            parts += [copied(spare) for _ in range(num_missing)]
            counts += [0] * num_missing
        is_one_tree = all(one.tree == taken[0].tree for one in taken)
        made = grouped(parts, tuple(counts), taken[0].tree if is_one_tree else None)
        return replace(made, is_counted=all(one.is_counted for one in taken))

    def put_back(self) -> None:
        """Undoes the latest `take`."""
        self._drawn.extendleft(reversed(self._taken))
        self._taken = []


class Lockstep(Iterator[SplitBatch]):
    """The steps of this worker, one for each step of the others.

    The workers tell each other what they have when the next step is asked for, on the thread that
    asks: collectives are called in one order. A step for which nobody has a sample is left out.
    """

    def __init__(self, draw: Draw, epoch: Epoch, splitter: Splitter, placement: Placement) -> None:
        self._draw = draw
        self._workers = epoch.readers.workers
        self._progress = epoch.progress
        self._splitter = splitter
        self._placement = placement
        # What a replica gets in a step for which this worker has no samples.
        self._spare: Any = MISSING
        self._tree: Tree | None = None

    def __next__(self) -> SplitBatch:
        while True:
            parts = self._agreed()
            if any(parts.counts):
                return parts
            self._progress.num_steps += 1
            self._progress.num_left_out += 1

    def _drawn(self) -> SplitBatch:
        return self._draw()

    @property
    def _num_replicas(self) -> int:
        return len(self._placement.devices)

    def _agreed(self) -> SplitBatch:
        """Returns the next step of this worker, which counts nothing if only others have one."""
        parts: SplitBatch | None = None
        failure: Exception | None = None

        def own() -> list[int]:
            nonlocal parts, failure
            parts = failure = None
            try:
                parts = self._drawn()
                if self._spare is MISSING:
                    example = arrived(parts).part(0)
                    self._spare = self._splitter.spare(example, parts.counts[0])
                    self._tree = parts.tree
            except StopIteration:
                pass
            except Exception as error:
                failure = error
            counts = [0] * self._num_replicas if parts is None else parts.counts
            is_counted = parts is None or parts.is_counted
            flags = failure is not None, parts is not None, self._spare is not MISSING, is_counted
            return [*map(int, flags), *counts]

        counts = self._settle(self._told(own), failure)
        if parts is not None:
            return replace(parts, counts=counts)
        if self._spare is MISSING:
            # The workers of an elastic job that had a batch were lost.
            raise StopIteration
        spares = [copied(self._spare) for _ in range(self._num_replicas)]
        return self._placement.place(grouped(spares, counts, self._tree))

    def _told(self, own: Callable[[], list[int]]) -> list[list[int]]:
        """Returns the flags and counts of all workers, by rank."""
        return [row.tolist() for row in self._workers.gather(torch.tensor(own()))]

    def _settle(self, rows: list[list[int]], failure: Exception | None) -> tuple[int, ...]:
        """Returns how many samples each replica has; at the end, it raises `StopIteration`."""
        flags = (row[:_NUM_FLAGS] for row in rows)
        failed, has_parts, has_spare, is_counted = zip(*flags, strict=True)
        if any(failed):
            self._fail(failure)
        have = list(zip(has_parts, has_spare, strict=True))
        # Nobody has parts, or some have none where no part can be empty.
        if not any(has_parts) or (not all(has_parts) and (True, False) in have):
            raise StopIteration
        if (False, False) in have:
            self._show()
        counts = tuple(count for row in rows for count in row[_NUM_FLAGS:])
        return counts if all(is_counted) else tuple(min(count, 1) for count in counts)

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
        return self._workers.gather_objects(own)


@dataclass(eq=False)
class OwnStep:
    """The samples of one step, as workers of an elastic job have read them.

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
        by_worker: dict[int, list[int]] = {worker: [] for worker in (*owners, *self.owners)}
        for worker, count in zip(self.owners, self.counts, strict=True):
            by_worker[worker].append(count)
        counts: list[int] = []
        for worker in dict.fromkeys(owners):
            had = by_worker[worker]
            if owners.count(worker) < len(had):
                raise UnsupportedError(
                    "A worker joined the job after this input was taken, so there are fewer "
                    "replicas for it than parts. Take the next input right before its run."
                )
            counts += had + [0] * (owners.count(worker) - len(had))
        lost = set(self.owners) - set(owners) - self._noted
        self._noted |= lost
        if num_lost := sum(sum(by_worker[worker]) for worker in lost):
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
    """The steps of a worker that may get other replicas at any time.

    Attributes:
        left: By number, how many samples each worker has left, if it knows.
    """

    def __init__(
        self,
        draw: Draw,
        epoch: Epoch,
        splitter: Splitter,
        placement: Placement,
        job: ElasticJob,
        note_lost: NoteLost,
    ) -> None:
        super().__init__(draw, epoch, splitter, placement)
        self._job = job
        self._note_lost = note_lost
        drops_rest = any(source.drops_rest for source in epoch.sources)
        self._queue = PartQueue(draw, splitter, drops_rest=drops_rest)
        known = [source.num_samples for source in epoch.sources]
        self._num_left = None if None in known else sum(number or 0 for number in known)
        self.left: dict[int, int | None] = {}

    def _drawn(self) -> SplitBatch:
        return self._queue.take(self._num_replicas)

    @property
    def _num_replicas(self) -> int:
        return len(self._layout.own)

    def _told(self, own: Callable[[], list[int]]) -> list[list[int]]:
        def own_and_left() -> list[int]:
            self._layout, self._owners = self._job.layout, self._job.owners
            row, left = own(), self._num_left
            return [*row, -1 if left is None else left - sum(row[_NUM_FLAGS:])]

        self._generation, told = self._job.tell(own_and_left, self._queue.put_back)
        rows: list[list[int]] = []
        numbers = iter(told)
        for replicas in self._layout.ranges:
            *row, left = itertools.islice(numbers, _NUM_FLAGS + len(replicas) + 1)
            self.left[self._owners[replicas.start]] = None if left < 0 else left
            rows.append(row)
        self._num_left = self.left[self._owners[self._layout.own.start]]
        return rows

    def _agreed(self) -> SplitBatch:
        parts, job = super()._agreed(), self._job
        step = OwnStep(self._owners, parts.counts, self._note_lost)
        parts = replace(parts, step=step, generation=self._generation)
        if self._generation == job.generation:
            return parts
        # A worker was lost after all had told.
        counts, num_replicas = step.counts_for(job.owners), len(job.layout.own)
        leaves = [filled(leaf, num_replicas) for leaf in parts.leaves]
        return replace(parts, leaves=leaves, counts=counts, generation=job.generation)

    def _gathered(self, own: Any) -> list[Any]:
        return self._job.transact(lambda: self._workers.gather_objects(own), lambda: None)
