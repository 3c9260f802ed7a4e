"""Workers that read data of their own are kept in step, and end together.

worker 0   0 1   .     .        a worker that has no more gets batches without samples
worker 1   0 1   2 3   4        until nobody has any
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unisono.errors import CommunicationError
from unisono.input.passes import Progress
from unisono.input.placement import Placed, Placement
from unisono.input.prefetch import Drawn
from unisono.input.splitting import Parts, join
from unisono.input.structure import take_apart
from unisono.reductions import Workers


class _State(enum.IntEnum):
    """What a worker has for the next step."""

    STEP = 0
    # Elements without a batch dimension: there is no empty one.
    WHOLE_STEP = 1
    END = 2
    # The end, and it does not know what a batch looks like.
    END_UNSEEN = 3
    FAILED = 4

    @property
    def is_step(self) -> bool:
        return self in (_State.STEP, _State.WHOLE_STEP)


@dataclass(frozen=True)
class _Round:
    """What all workers have for one step."""

    states: list[_State]
    counts: tuple[int, ...]
    is_counted: bool

    @property
    def is_last(self) -> bool:
        """Whether there is no step: nobody has one, or one is missing that cannot be empty."""
        num_steps = sum(state.is_step for state in self.states)
        is_missing = num_steps < len(self.states)
        return num_steps == 0 or (is_missing and _State.WHOLE_STEP in self.states)


class InStep(Drawn[Placed]):
    """The steps of this worker, one for each step of the others.

    The workers tell each other what they have when the next step is asked for, on the thread that
    asks: collectives are called in one order. A step for which nobody has a sample is left out.

    Args:
        steps: What this worker reads. It may be drawn ahead.
        workers: All workers.
        placement: Where empty batches go.
        progress: Counts the steps that are left out.
    """

    def __init__(
        self, steps: Drawn[Placed], workers: Workers, placement: Placement, progress: Progress
    ) -> None:
        self._steps = steps
        self._workers = workers
        self._placement = placement
        self._progress = progress
        self._num_replicas = len(placement.devices)
        self._has_ended = False
        self._empty: Parts | None = None

    def __next__(self) -> Placed:
        while True:
            placed = self._agreed()
            if any(placed.parts.counts):
                return placed
            self._progress.num_steps += 1
            self._progress.num_left_out += 1

    def close(self) -> None:
        """See `Drawn.close`."""
        self._steps.close()

    def _agreed(self) -> Placed:
        """Returns the next step of this worker, empty if it has none but others have."""
        failure: Exception | None = None
        placed: Placed | None = None
        try:
            placed = self._own()
        except Exception as error:
            failure = error
        told = self._tell(placed, failure)
        if _State.FAILED in told.states:
            self._fail(failure, told)
        if told.is_last:
            raise StopIteration
        if _State.END_UNSEEN in told.states:
            self._show()
        if placed is None:
            assert self._empty is not None
            placed = self._placement.place(self._empty)
        parts = replace(placed.parts, counts=told.counts, is_counted=told.is_counted)
        return replace(placed, parts=parts)

    def _own(self) -> Placed | None:
        if self._has_ended:
            return None
        try:
            placed = next(self._steps)
        except StopIteration:
            self._has_ended = True
            return None
        if self._empty is None:
            self._empty = self._placement.hand_out(placed).emptied(self._num_replicas)
        return placed

    def _tell(self, placed: Placed | None, failure: Exception | None) -> _Round:
        counts, is_counted = (0,) * self._num_replicas, True
        if placed is not None:
            counts, is_counted = placed.parts.counts, placed.parts.is_counted
        own = torch.tensor([self._state(placed, failure), is_counted, *counts])
        rows = [row.tolist() for row in self._workers.gather(own)]
        return _Round(
            [_State(row[0]) for row in rows],
            tuple(count for row in rows for count in row[2:]),
            all(row[1] for row in rows),
        )

    def _state(self, placed: Placed | None, failure: Exception | None) -> _State:
        if failure is not None:
            return _State.FAILED
        if placed is None:
            return _State.END_UNSEEN if self._empty is None else _State.END
        return _State.WHOLE_STEP if self._empty is None else _State.STEP

    def _fail(self, failure: Exception | None, told: _Round) -> None:
        """Raises on every worker if one cannot read: the others would wait for it in vain."""
        reasons = self._workers.gather_objects(None if failure is None else repr(failure))
        if failure is not None:
            raise failure
        ranks = [rank for rank, reason in enumerate(reasons) if reason is not None]
        listed = ", ".join(f"worker {rank} raised {reasons[rank]}" for rank in ranks)
        raise CommunicationError(f"Other workers cannot read their input: {listed}.", ranks)

    def _show(self) -> None:
        """Shows those who have never seen a batch what one looks like."""
        shown = self._workers.gather_objects(_on_host(self._empty))
        if self._empty is None:
            batch = next(batch for batch in shown if batch is not None)
            parts = join([batch[0]] * self._num_replicas)
            self._empty = replace(parts, counts=(0,) * self._num_replicas)


def _on_host(empty: Parts | None) -> tuple[Any] | None:
    """Returns an empty batch as it can be sent, in a tuple because None may be a batch too."""
    if empty is None:
        return None
    tree, leaves = take_apart(empty.tree.build([leaf[0] for leaf in empty.leaves]))
    return (tree.build([leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]),)
