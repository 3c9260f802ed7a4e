"""Who reads the input: workers that all read the same batches, or each its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from unisono.communicators import IdentityCommunicator
from unisono.errors import UnsupportedError
from unisono.input.sources.random_state import RandomState, random_state, set_random_state
from unisono.reductions import ReplicaLayout, Workers

T = TypeVar("T")


class Moving(Protocol):
    """An elastic job, in which this worker may get other replicas."""

    generation: int
    is_arriving: bool

    @property
    def layout(self) -> ReplicaLayout:
        """Which replicas each worker has."""

    @property
    def owners(self) -> tuple[int, ...]:
        """The number of the worker that each replica has. A worker keeps its number."""

    def tell(
        self, own: Callable[[], Sequence[int]], undo: Callable[[], None]
    ) -> tuple[int, tuple[int, ...]]:
        """All workers tell each other numbers, again if a worker is lost meanwhile.

        Args:
            own: Returns the numbers of this worker.
            undo: Makes everything what it was before `own`.

        Returns:
            The generation of the workers that have told, and all their numbers by rank.
        """

    def at_boundary(self, given: Any) -> None:
        """Before the next batch of an input is taken: lets workers leave and join."""

    def transact(self, work: Callable[[], T], undo: Callable[[], None]) -> T:
        """Does what all workers do together, again if a worker is lost meanwhile."""

    def add_input(self, given: Any) -> None:
        """Lets an input know when this worker gets other replicas."""


class Readers:
    """Workers that all read the same batches, each to keep its part, or each its own.

    Args:
        workers: All workers. None means one that is alone.
        job: The elastic job, if it is one.
        own_data: Whether workers read their own data, if there are many.

    Attributes:
        are_apart: Whether workers read their own data.
    """

    def __init__(self, workers: Workers | None, job: Moving | None, *, own_data: bool) -> None:
        self.workers = workers or Workers(IdentityCommunicator())
        self._job = job
        self.are_apart = own_data and (job is not None or self.workers.are_many)

    def prepare(self, generators: Sequence[torch.Generator]) -> None:
        """Makes all workers that read the same shuffle alike, with the chief's generators."""
        if self.are_apart:
            return
        take_over = functools.partial(self._take_over, generators)
        if self._job is None:
            take_over()
        elif not self._job.is_arriving:
            # One that arrives has got the generators of the others, in the middle of an epoch.
            before = random_state(generators)
            self._job.transact(take_over, lambda: set_random_state(before, generators))

    def _take_over(self, generators: Sequence[torch.Generator]) -> None:
        if self.workers.are_many:
            of_chief = self.workers.gather_objects(random_state(generators))[0]
            set_random_state(of_chief, generators)

    def states(self, generators: Sequence[torch.Generator]) -> tuple[RandomState, ...]:
        """Returns the random generators of all workers, as far as they may differ.

        All are saved, so that what one worker saves serves all. But what a worker of an elastic job
        has read itself, others do not know.
        """
        own = random_state(generators)
        is_for_all = self.are_apart and self._job is None
        return tuple(self.workers.gather_objects(own)) if is_for_all else (own,)

    def own(self, states: Sequence[RandomState]) -> RandomState:
        """Returns the state of this worker among those that `states` returned, then or now."""
        communicator = self.workers.communicator
        if not self.are_apart and len(states) != 1:
            raise UnsupportedError(
                f"In the saved state {len(states)} workers read different data, but here all "
                "workers read the same data. Resume with the same dataset and policy."
            )
        if self.are_apart and len(states) != communicator.size:
            raise UnsupportedError(
                f"In the saved state {len(states)} workers read different data, but this job has "
                f"{communicator.size} workers. Resume with {len(states)} workers."
            )
        return states[communicator.rank if self.are_apart else 0]
