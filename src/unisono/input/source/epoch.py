"""One epoch over the sources of a worker: begun, or resumed where another was saved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from unisono.arguments import check_int, in_words
from unisono.errors import UnsupportedError
from unisono.input.source.random_state import (
    RandomState,
    check_random_states,
    random_state,
    replayed,
    set_random_state,
)
from unisono.input.source.sources import Source
from unisono.reductions import Workers

if TYPE_CHECKING:
    from unisono.workers.elastic import ElasticJob


class Readers:
    """Workers that all read the same batches, each to keep its part, or that `are_apart`.

    Then each reads its own data. No `workers` means one that is alone.

    Attributes:
        draw_alike: Whether others read the same, so that all must draw the same random numbers.
    """

    def __init__(self, workers: Workers | None, job: ElasticJob | None, *, own_data: bool) -> None:
        self.workers = workers or Workers()
        self._job = job
        are_many = job is not None or self.workers.are_many
        self.are_apart = are_many and own_data
        self.draw_alike = are_many and not own_data

    def prepare(self, generators: Sequence[torch.Generator]) -> None:
        """Makes all workers that read the same shuffle alike, with the chief's generators."""
        if self.are_apart:
            return

        def take_over() -> None:
            if self.workers.are_many:
                of_chief = self.workers.gather_objects(random_state(generators))[0]
                set_random_state(of_chief, generators)

        if self._job is None:
            take_over()
        elif not self._job.is_arriving:
            # One that arrives has got the generators of the others, in the middle of an epoch.
            before = random_state(generators)
            self._job.transact(take_over, lambda: set_random_state(before, generators))

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
        if not self.are_apart and len(states) != 1:
            raise UnsupportedError(
                f"In the saved state {len(states)} workers read different data, but here all "
                "workers read the same data. Resume with the same dataset and policy."
            )
        if self.are_apart and len(states) != self.workers.size:
            raise UnsupportedError(
                f"In the saved state {len(states)} workers read different data, but this job has "
                f"{self.workers.size} workers. Resume with {len(states)} workers."
            )
        return states[self.workers.rank if self.are_apart else 0]


@dataclass
class Progress:
    """How far an epoch is, and what it takes to get there again.

    Attributes:
        num_left_out: Those of them that were not handed out, because no worker had a sample.
        batches_per_step: Batches that each source gives in `steps_per_batch` steps.
        at_start: The random generators before the sources were opened, of each worker that reads
            its own data; None when no epoch is under way, because none was begun or the last
            one came to its end.
        at_first: The same, before the first batch was drawn.
        was_running: Which sources kept something from an earlier epoch.
    """

    num_steps: int = 0
    num_left_out: int = 0
    batches_per_step: int = 1
    steps_per_batch: int = 1
    batch_size: int | None = None
    at_start: tuple[RandomState, ...] | None = None
    at_first: tuple[RandomState, ...] | None = None
    was_running: tuple[bool, ...] = ()

    def anew(self) -> Progress:
        """Returns the progress of an epoch that is not begun."""
        return Progress(
            batches_per_step=self.batches_per_step, steps_per_batch=self.steps_per_batch
        )

    @property
    def num_consumed(self) -> int:
        """How many batches of each source are used up."""
        return self.num_steps * self.batches_per_step // self.steps_per_batch

    def state_dict(self) -> dict[str, Any]:
        """Returns what `from_state_dict` reads."""
        if self.at_start is None:
            return asdict(self.anew())
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Progress:
        """Reads what `state_dict` returned."""
        names = {field.name for field in fields(cls)}
        if not isinstance(state, Mapping) or set(state) != names:
            found = in_words(list(state) if isinstance(state, Mapping) else state)
            raise UnsupportedError(
                f"The state of an input must have the keys {sorted(names)}, got {found}. Load what "
                "its `state_dict()` returned."
            )
        for name in ("num_steps", "num_left_out"):
            check_int(name, state[name], least=0)
        for name in ("batches_per_step", "steps_per_batch"):
            check_int(name, state[name], least=1)
        if state["batch_size"] is not None:
            check_int("batch_size", state["batch_size"], least=1)
        running = state["was_running"]
        if not isinstance(running, (list, tuple)) or not all(type(one) is bool for one in running):
            raise UnsupportedError(f"`was_running` must be a tuple of bools, got {running!r}.")
        for name in ("at_start", "at_first"):
            if state[name] is not None:
                check_random_states(name, state[name])
        return cls(**state)


@dataclass(frozen=True)
class Epoch:
    """Sources that are being iterated, and how far they are."""

    sources: Sequence[Source]
    batches: Sequence[Iterator[Any]]
    progress: Progress
    readers: Readers

    @classmethod
    def begin(cls, sources: Sequence[Source], readers: Readers, progress: Progress) -> Epoch:
        """Opens the sources as plain iteration would, with a progress that is new."""
        generators = _generators(sources)
        readers.prepare(generators)
        progress.at_start = readers.states(generators)
        progress.was_running = tuple(source.is_running for source in sources)
        return cls(sources, [source.open() for source in sources], progress, readers)

    @classmethod
    def resume(
        cls, sources: Sequence[Source], readers: Readers, progress: Progress, *, refetch: bool
    ) -> Epoch:
        """Opens the sources as they were opened then, and skips what was consumed.

        The global random generators are left where they are: what they were when the state was
        saved is not a matter of the input.
        """
        assert progress.at_start is not None
        generators = _generators(sources)
        readers.prepare(generators)
        at_start = readers.own(progress.at_start)
        then = len(progress.was_running), len(at_start["generators"])
        now = len(sources), len(generators)
        if then != now:
            raise UnsupportedError(
                f"The saved state is of {then[0]} sources with {then[1]} random generators, but "
                f"this input has {now[0]} sources with {now[1]}. Resume with the same dataset and "
                "samplers."
            )
        with replayed(at_start, generators):
            for source, was_running in zip(sources, progress.was_running, strict=True):
                if was_running and not source.is_running:
                    source.start()
                if source.is_running and not was_running:
                    source.stop()
        num_consumed = progress.num_consumed
        with replayed(at_start, generators):
            opened = [source.reopen(num_consumed, refetch=refetch) for source in sources]
        batches = [batches for batches, _ in opened]
        if progress.at_first is not None:
            with replayed(readers.own(progress.at_first), generators):
                num_found = max(skip() for _, skip in opened)
                if progress.num_steps * progress.batches_per_step % progress.steps_per_batch:
                    # The next batch was drawn then, and used in part.
                    firsts = [list(itertools.islice(one, 1)) for one in batches]
                    batches = list(map(itertools.chain, firsts, batches))
            # The last step may have lacked a batch. Other workers may have more, so that this one
            # was at its end before.
            least = progress.num_consumed - progress.batches_per_step
            if num_found <= least and not readers.are_apart:
                raise UnsupportedError(
                    f"The saved state is {progress.num_consumed} batches into the input, but this "
                    f"input has only {num_found}. Resume with the same dataset."
                )
        return cls(sources, batches, progress, readers)

    def note_first_draw(self) -> None:
        """Remembers the random generators, from which many a sampler draws only now."""
        if self.progress.at_first is None:
            self.progress.at_first = self.readers.states(_generators(self.sources))


def _generators(sources: Sequence[Source]) -> list[Any]:
    return list(dict.fromkeys(own for source in sources for own in source.generators))
