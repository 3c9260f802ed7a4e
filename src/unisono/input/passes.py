"""One pass over the sources of a host: begun, or resumed where another was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from unisono.errors import UnsupportedError
from unisono.input.random_state import RandomState, random_state, replayed
from unisono.input.source import Source


@dataclass
class Progress:
    """How far a pass is, and what it takes to get there again.

    Attributes:
        num_steps: Steps handed out. What was fetched ahead does not count.
        batches_per_step: Batches that each source gives a step.
        batch_size: The size of a full batch, where the split depends on it.
        at_start: The random generators before the sources were opened; None when no pass is
            under way, because none was begun or the last one came to its end.
        at_first: The same, before the first batch was drawn.
        was_running: Which sources kept something from an earlier pass.
    """

    num_steps: int = 0
    batches_per_step: int = 1
    batch_size: int | None = None
    at_start: RandomState | None = None
    at_first: RandomState | None = None
    was_running: tuple[bool, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Returns what `from_state_dict` reads."""
        if self.at_start is None:
            return asdict(Progress(batches_per_step=self.batches_per_step))
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Progress:
        """Reads what `state_dict` returned."""
        names = {field.name for field in fields(cls)}
        if not isinstance(state, Mapping) or set(state) != names:
            found = sorted(state) if isinstance(state, Mapping) else repr(state)
            raise UnsupportedError(
                f"The state of an input holds {sorted(names)}, got {found}. Load what its "
                "`state_dict()` returned."
            )
        return cls(**state)


@dataclass(frozen=True)
class Pass:
    """Sources that are being iterated, and how far they are."""

    sources: Sequence[Source]
    batches: Sequence[Iterator[Any]]
    progress: Progress

    @classmethod
    def begin(cls, sources: Sequence[Source], batches_per_step: int = 1) -> Pass:
        """Opens the sources as plain iteration would."""
        progress = Progress(
            batches_per_step=batches_per_step,
            at_start=random_state(_generators(sources)),
            was_running=tuple(source.is_running for source in sources),
        )
        return cls(sources, [source.open() for source in sources], progress)

    @classmethod
    def resume(cls, sources: Sequence[Source], progress: Progress, *, refetch: bool) -> Pass:
        """Opens the sources as they were opened then, and skips what was consumed.

        The global random generators are left where they are: what they were when the state was
        saved is not a matter of the input.
        """
        assert progress.at_start is not None
        generators = _generators(sources)
        _check(progress, sources, generators)
        with replayed(progress.at_start, generators):
            for source, was_running in zip(sources, progress.was_running, strict=True):
                if was_running and not source.is_running:
                    source.start()
        num_consumed = progress.num_steps * progress.batches_per_step
        with replayed(progress.at_start, generators):
            opened = [source.reopen(num_consumed, refetch=refetch) for source in sources]
        if progress.at_first is not None:
            with replayed(progress.at_first, generators):
                for _, skip in opened:
                    skip()
        return cls(sources, [batches for batches, _ in opened], progress)

    def note_first_draw(self) -> None:
        """Remembers the random generators, from which many a sampler draws only now."""
        if self.progress.at_first is None:
            self.progress.at_first = random_state(_generators(self.sources))


def _generators(sources: Sequence[Source]) -> list[Any]:
    return list(dict.fromkeys(own for source in sources for own in source.generators))


def _check(progress: Progress, sources: Sequence[Source], generators: Sequence[Any]) -> None:
    saved = progress.at_start or {}
    then = len(progress.was_running), len(saved["generators"])
    now = len(sources), len(generators)
    if then != now:
        raise UnsupportedError(
            f"The saved state is of {then[0]} sources with {then[1]} random generators of their "
            f"own, this input has {now[0]} with {now[1]}. Resume with the input that was saved."
        )
