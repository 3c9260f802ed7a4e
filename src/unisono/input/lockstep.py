"""Workers that read data of their own are kept in step, and end together.

worker 0   0 1   .     .        a worker that has no more gets samples that count nothing
worker 1   0 1   2 3   4        until nobody has any
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unisono.errors import CommunicationError
from unisono.input.placement import PlacedBatch, Placement
from unisono.input.prefetch import Steps
from unisono.input.sources import Progress
from unisono.input.splits import MISSING, Splitter, grouped
from unisono.reductions import Workers
from unisono.values import Tree, map_leaves


class State(enum.IntEnum):
    """What a worker has for the next step."""

    STEP = 0
    # A step that must be replaced by an empty one, and cannot be.
    WHOLE_STEP = 1
    END = 2
    # The end, and it does not know what a batch looks like.
    END_UNSEEN = 3
    FAILED = 4

    @property
    def is_step(self) -> bool:
        """Whether it has a step."""
        return self in (State.STEP, State.WHOLE_STEP)


@dataclass(frozen=True)
class Round:
    """What all workers have for one step."""

    states: list[State]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, rows: list[list[int]]) -> Round:
        """Reads what workers have told: a state, whether samples are counted, and how many."""
        counts = tuple(count for row in rows for count in row[2:])
        if not all(row[1] for row in rows):
            counts = tuple(min(count, 1) for count in counts)
        return cls([State(row[0]) for row in rows], counts)

    @property
    def is_last(self) -> bool:
        """Whether there is no step: nobody has one, or one is missing that cannot be empty."""
        num_steps = sum(state.is_step for state in self.states)
        is_missing = num_steps < len(self.states)
        return num_steps == 0 or (is_missing and State.WHOLE_STEP in self.states)


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
        told = self._tell(placed, failure)
        if State.FAILED in told.states:
            self._fail(failure, told)
        if told.is_last:
            raise StopIteration
        if State.END_UNSEEN in told.states:
            self._show()
        if placed is None:
            spares = [self._splitter.spare(self._spare) for _ in range(self._num_replicas)]
            placed = self._placement.place(grouped(spares, told.counts, self._tree))
        return replace(placed, parts=replace(placed.parts, counts=told.counts))

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

    def _tell(self, placed: PlacedBatch | None, failure: Exception | None) -> Round:
        counts, is_counted = (0,) * self._num_replicas, True
        if placed is not None:
            counts, is_counted = placed.parts.counts, placed.parts.is_counted
        own = torch.tensor([self._state(placed, failure), is_counted, *counts])
        return Round.of([row.tolist() for row in self._workers.gather(own)])

    def _state(self, found: object, failure: Exception | None) -> State:
        if failure is not None:
            return State.FAILED
        if found is None:
            return State.END_UNSEEN if self._spare is MISSING else State.END
        return State.WHOLE_STEP if self._spare is MISSING else State.STEP

    def _fail(self, failure: Exception | None, told: Round) -> None:
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
        # In a tuple, because None may be a batch, too.
        own = None if self._spare is MISSING else (map_leaves(_on_host, self._spare),)
        shown = [batch for batch in self._gathered(own) if batch is not None]
        if self._spare is MISSING and shown:
            (self._spare,) = shown[0]

    def _gathered(self, own: Any) -> list[Any]:
        """Returns what all workers have as `own`, by rank."""
        return self._workers.gather_objects(own)


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf
