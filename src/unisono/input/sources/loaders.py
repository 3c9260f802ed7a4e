"""`DataLoader` as a source: how its epochs are opened, and resumed without fetching."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unisono.input.sources.source import Skip, Source, drop

# These draw what they need from the global generators before they give their first index.
_DRAW_AT_ONCE: set[type] = {
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
}
_COPIED = (
    "collate_fn",
    "dataset",
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


def draws_at_once(kind: type) -> None:
    """Says of a sampler that it draws all random numbers before it gives its first index."""
    _DRAW_AT_ONCE.add(kind)


def copied_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns what another loader is given to load as this one does, whatever it samples."""
    return {name: getattr(loader, name) for name in _COPIED}


class LoaderSource(Source):
    """The batches of a `DataLoader`.

    It is alone when its samples are made by workers and its sampler is one of torch's. Without
    workers the dataset's random transforms draw from the global generators, and a sampler of the
    user's own may draw from them for every batch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        batch_sampler: Any = loader.batch_sampler
        samplers = [loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
        self.generators = _own_generators([loader, *samplers])
        self.is_alone = loader.num_workers > 0 and (
            self._is_iterable or all(map(_draws_at_once, samplers))
        )
        self.has_one_epoch = loader.persistent_workers
        self.drops_rest = bool(getattr(batch_sampler, "drop_last", loader.drop_last))
        self.batch_size = loader.batch_size or getattr(batch_sampler, "batch_size", None)

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader."""
        return self._loader

    @property
    def num_samples(self) -> int | None:
        """See `Source.num_samples`."""
        batches: Any = self._loader.batch_sampler
        if self._is_iterable or type(batches) is not BatchSampler:
            return None
        try:
            num_samples = len(batches.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        return num_samples - num_samples % batches.batch_size * batches.drop_last

    @property
    def is_running(self) -> bool:
        """See `Source.is_running`: workers that persist are not seeded again for the next epoch."""
        return self._loader.persistent_workers and self._loader._iterator is not None

    def open(self) -> Iterator[Any]:
        return iter(self._loader)

    def start(self) -> None:
        iter(self._loader)

    def reopen(self, num_consumed: int, *, refetch: bool) -> tuple[Iterator[Any], Skip]:
        """See `Source.reopen`.

        Without workers the sampler skips and nothing is fetched. Workers fetch again what was
        consumed, so that their random generators arrive where they were, unless `refetch` is off.
        """
        can_skip = type(self._loader) is DataLoader and not self._is_iterable
        if can_skip and num_consumed and not (self._loader.num_workers and refetch):
            return self._skipped(num_consumed)
        return super().reopen(num_consumed, refetch=refetch)

    def _skipped(self, num_consumed: int) -> tuple[Iterator[Any], Skip]:
        loader: Any = self._loader
        settings = copied_settings(loader)
        if loader.batch_sampler is None:
            sampler = _Rest(loader.sampler, num_consumed)
            rest = DataLoader(batch_size=None, sampler=sampler, **settings)
        else:
            sampler = _Rest(loader.batch_sampler, num_consumed)
            rest = DataLoader(batch_sampler=sampler, **settings)
        return iter(rest), sampler.skip

    def __len__(self) -> int:
        return len(self._loader)


class _Rest(Sampler[Any]):
    """What a sampler gives after its first items, which are drawn but not used."""

    def __init__(self, sampler: Iterable[Any], num_skipped: int) -> None:
        self._sampler = sampler
        self._to_skip = num_skipped
        self._num_skipped = 0
        self._items: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._items = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._items)

    def skip(self) -> int:
        to_skip, self._to_skip = self._to_skip, 0
        self._num_skipped += drop(self._items, to_skip)
        return self._num_skipped


def _draws_at_once(sampler: Any) -> bool:
    return sampler is None or type(sampler) in _DRAW_AT_ONCE


def _own_generators(things: Iterable[Any]) -> tuple[torch.Generator, ...]:
    found = (getattr(thing, "generator", None) for thing in things)
    mine = {
        id(generator): generator
        for generator in found
        if isinstance(generator, torch.Generator) and generator is not torch.default_generator
    }
    return tuple(mine.values())
