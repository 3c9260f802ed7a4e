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


class Readers:
    """Workers that all read the same batches, each to keep its part; or a worker that is alone."""

    are_apart = False

    def __init__(self, workers: Workers | None = None) -> None:
        self.workers = workers or Workers(IdentityCommunicator())

    def prepare(self, generators: Sequence[torch.Generator]) -> None:
        """Makes all workers shuffle alike: they take over the random generators of the chief."""
        if self.workers.are_many:
            of_chief = self.workers.gather_objects(random_state(generators))[0]
            set_random_state(of_chief, generators)

    def states(self, generators: Sequence[torch.Generator]) -> tuple[RandomState, ...]:
        """Returns the random generators of all workers, as far as they may differ."""
        return (random_state(generators),)

    def own(self, states: Sequence[RandomState]) -> RandomState:
        """Returns the state of this worker among those that `states` returned, then or now."""
        if len(states) != 1:
            raise UnsupportedError(
                f"In the saved state {len(states)} workers read different data, but here all "
                "workers read the same data. Resume with the same dataset and policy."
            )
        return states[0]


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


class MovingReaders(Readers):
    """Workers of an elastic job, which all read the same batches."""

    def __init__(self, workers: Workers, job: Moving) -> None:
        super().__init__(workers)
        self._job = job

    def prepare(self, generators: Sequence[torch.Generator]) -> None:
        if self._job.is_arriving:
            # It has got the random generators of the others, in the middle of an epoch.
            return
        before = random_state(generators)
        take_over = functools.partial(super().prepare, generators)
        self._job.transact(take_over, lambda: set_random_state(before, generators))


class ReadersApart(Readers):
    """Many workers, each with its own data."""

    are_apart = True

    def prepare(self, generators: Sequence[torch.Generator]) -> None:
        """See `Readers.prepare`: everybody shuffles its own data as it likes."""

    def states(self, generators: Sequence[torch.Generator]) -> tuple[RandomState, ...]:
        """See `Readers.states`. All are saved, so that what one worker saves serves all."""
        return tuple(self.workers.gather_objects(random_state(generators)))

    def own(self, states: Sequence[RandomState]) -> RandomState:
        communicator = self.workers.communicator
        if len(states) != communicator.size:
            raise UnsupportedError(
                f"In the saved state {len(states)} workers read different data, but this job has "
                f"{communicator.size} workers. Resume with {len(states)} workers."
            )
        return states[communicator.rank]


class MovingReadersApart(ReadersApart):
    """Workers of an elastic job, each with its own data. What one has read, others do not know."""

    def states(self, generators: Sequence[torch.Generator]) -> tuple[RandomState, ...]:
        return (random_state(generators),)


def readers_of(workers: Workers | None, *, own_data: bool) -> Readers:
    """Says how the workers read: the same batches, or each its own."""
    are_many = workers is not None and workers.are_many
    return ReadersApart(workers) if own_data and are_many else Readers(workers)
