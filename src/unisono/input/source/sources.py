"""What batches come from: loaders, iterables, iterators and functions, opened again each epoch."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from unisono.errors import UnsupportedError

# These draw what they need from the global generators before they give their first index.
DRAW_AT_ONCE: set[type] = {
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
}
_COPIED = """
    collate_fn dataset generator in_order multiprocessing_context num_workers pin_memory
    pin_memory_device prefetch_factor timeout worker_init_fn
"""

Skip: TypeAlias = Callable[[], int]


def loader_like(loader: DataLoader[Any], **settings: Any) -> DataLoader[Any]:
    """Returns a loader that loads as another one does, whatever it samples."""
    return DataLoader(**{name: getattr(loader, name) for name in _COPIED.split()} | settings)


class Source(ABC):
    """Gives the batches of one epoch after another.

    Attributes:
        is_alone: Whether drawing a batch from an open epoch leaves the global random generators
            of this process alone, so that it may be done at any time and on any thread.
        has_one_epoch: Whether opening an epoch ends the one before.
        drops_rest: Whether its batches are all of one size because the rest was dropped.
        stacks_samples: Whether `default_collate` makes its batches.
        is_running: Whether something is kept from an earlier epoch that changes how the next one
            opens: workers that persist are not seeded again.
        num_samples: How many samples an epoch has, if it says so.
    """

    generators: tuple[torch.Generator, ...] = ()
    is_alone: bool = False
    has_one_epoch: bool = False
    drops_rest: bool = False
    stacks_samples: bool = False
    batch_size: int | None = None
    is_running: Any = False
    num_samples: Any = None

    def batch_size_after(self, num_consumed: int) -> int | None:
        """Returns how many samples the next batch has, if it is known. The last may have fewer."""
        full, total = self.batch_size, self.num_samples
        if full is None or total is None:
            return full
        return min(full, int(total) - num_consumed * full)

    @abstractmethod
    def open(self) -> Iterator[Any]:
        """Begins an epoch."""

    def start(self) -> None:
        """Makes it keep what it keeps from epoch to epoch."""
        raise UnsupportedError(
            "The saved state is of a `DataLoader` with `persistent_workers=True`, and this one has "
            "other settings. Resume with the same `DataLoader` settings."
        )

    def stop(self) -> None:  # noqa: B027
        """Makes it forget what it keeps from epoch to epoch."""

    def reopen(self, num_consumed: int, *, refetch: bool) -> tuple[Iterator[Any], Skip]:
        """Begins an epoch; also returns a function that skips what an earlier epoch has consumed.

        The function returns how many batches it found, which are fewer at the end of the input.

        `refetch` asks for the same bits even where the source keeps random generators in other
        processes, at the price of fetching again what was consumed.
        """
        del refetch
        batches = self.open()
        return batches, lambda: drop(batches, num_consumed)

    def example(self) -> Any:
        """Returns a batch, or one like it of a single sample, and leaves the source as it is."""
        raise UnsupportedError(
            "`element_spec` is not known because this input gives its batches only once. Take the "
            "first element, and read the shapes and dtypes of its tensors."
        )

    def __len__(self) -> int:
        raise TypeError(
            f"{type(self).__name__} does not know how many batches it gives. Iterate without "
            "`len()`."
        )


def drop(items: Iterator[Any], count: int) -> int:
    """Draws `count` items that an earlier epoch has consumed, and returns how many there were."""
    return sum(1 for _ in itertools.islice(items, count))


class IterableSource(Source):
    """Anything that gives all its batches each time it is iterated."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def open(self) -> Iterator[Any]:
        return iter(self._batches)

    def example(self) -> Any:
        return next(self.open())

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


class IteratorSource(Source):
    """An iterator, such as a running generator, which gives its batches once."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches: Iterator[Any] | None = batches
        self._kind = type(batches).__name__

    def open(self) -> Iterator[Any]:
        if self._batches is None:
            raise UnsupportedError(
                f"This input is a {self._kind}, which gives its batches only once, and it has been "
                "iterated before. Distribute something that can be iterated again: a list, a "
                "`DataLoader`, or an object whose `__iter__` makes a new generator."
            )
        batches, self._batches = self._batches, None
        return batches


class FunctionSource(Source):
    """A function that is called for each batch, until it raises `StopIteration`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def open(self) -> Iterator[Any]:
        # Unlike a generator, this goes on after another error.
        return iter(self._function, _Never())


class _Never:
    """Equals nothing."""

    def __eq__(self, other: object) -> bool:
        return False


class LoaderSource(Source):
    """The batches of a `DataLoader`.

    It is alone when its samples are made by workers and its sampler is one of torch's. Without
    workers the dataset's random transforms draw from the global generators, and a sampler of the
    user's own may draw from them for every batch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        batch_sampler: Any = loader.batch_sampler
        samplers = [loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
        found = (getattr(thing, "generator", None) for thing in (loader, *samplers))
        own = [generator for generator in found if isinstance(generator, torch.Generator)]
        self.generators = tuple(dict.fromkeys(g for g in own if g is not torch.default_generator))
        self.is_alone = loader.num_workers > 0 and (
            self._is_iterable or all(one is None or type(one) in DRAW_AT_ONCE for one in samplers)
        )
        self.has_one_epoch = loader.persistent_workers
        self.stacks_samples = loader.collate_fn is default_collate
        self.drops_rest = bool(getattr(batch_sampler, "drop_last", loader.drop_last))
        self.batch_size = loader.batch_size or getattr(batch_sampler, "batch_size", None)

    @property
    def num_samples(self) -> int | None:
        """See `Source.num_samples`."""
        batches: Any = self.loader.batch_sampler
        if self._is_iterable or type(batches) is not BatchSampler:
            return None
        try:
            num_samples = len(batches.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        return num_samples - num_samples % batches.batch_size * batches.drop_last

    @property
    def is_running(self) -> bool:
        """See `Source.is_running`."""
        return self.loader.persistent_workers and self.loader._iterator is not None

    def open(self) -> Iterator[Any]:
        return iter(self.loader)

    def start(self) -> None:
        iter(self.loader)

    def stop(self) -> None:
        self.loader._iterator = None

    def example(self) -> Any:
        dataset, collate = self.loader.dataset, self.loader.collate_fn
        first = next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]
        return collate(first if self.loader.batch_sampler is None else [first])

    def reopen(self, num_consumed: int, *, refetch: bool) -> tuple[Iterator[Any], Skip]:
        """Begins an epoch where another was.

        Without workers the sampler skips and nothing is fetched. Workers fetch again what was
        consumed, so that their random generators arrive where they were, unless `refetch` is off.
        """
        can_skip = type(self.loader) is DataLoader and not self._is_iterable
        if can_skip and num_consumed and not (self.loader.num_workers and refetch):
            return self._skipped(num_consumed)
        return super().reopen(num_consumed, refetch=refetch)

    def _skipped(self, num_consumed: int) -> tuple[Iterator[Any], Skip]:
        loader: Any = self.loader
        if loader.batch_sampler is None:
            sampler = _Rest(loader.sampler, num_consumed)
            rest = loader_like(loader, batch_size=None, sampler=sampler)
        else:
            sampler = _Rest(loader.batch_sampler, num_consumed)
            rest = loader_like(loader, batch_sampler=sampler)
        return iter(rest), sampler.skip

    def __len__(self) -> int:
        return len(self.loader)


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


def as_source(batches: Any) -> Source:
    """Says how to draw batches from what a user gave."""
    if isinstance(batches, DataLoader):
        return LoaderSource(batches)
    kind = type(batches).__name__
    if isinstance(batches, IterableDataset):
        raise UnsupportedError(
            f"Cannot tell whether this {kind} gives samples or batches. Wrap it in "
            "`DataLoader(dataset, batch_size=global_batch_size)` if it gives samples, in "
            "`DataLoader(dataset, batch_size=None)` if it gives whole batches."
        )
    if isinstance(batches, Dataset):
        raise UnsupportedError(
            f"This {kind} gives single samples, but a strategy distributes batches. Wrap it in "
            "`DataLoader(dataset, batch_size=global_batch_size)`."
        )
    arrays = (Tensor, np.ndarray)
    is_tuple_of_arrays = isinstance(batches, tuple) and any(isinstance(x, arrays) for x in batches)
    if isinstance(batches, arrays) or is_tuple_of_arrays:
        raise UnsupportedError(
            f"A strategy distributes batches, got a {kind} of data. Wrap it in "
            "`DataLoader(TensorDataset(x, y), batch_size=global_batch_size)`, or make it a list if "
            "its items are batches."
        )
    if isinstance(batches, (str, bytes, Mapping)) or not isinstance(batches, Iterable):
        raise UnsupportedError(
            f"Input must be a `DataLoader` or an iterable of batches, got {batches!r} of type "
            f"{kind}."
        )
    return IteratorSource(batches) if isinstance(batches, Iterator) else IterableSource(batches)


def sampler_of(source: Any) -> DistributedSampler[Any] | None:
    """Returns the sampler of a loader that gives each replica its own samples, if it has one."""
    if not isinstance(source, DataLoader):
        return None
    inner = getattr(source.batch_sampler, "sampler", None)
    samplers = (source.sampler, source.batch_sampler, inner)
    return next((one for one in samplers if isinstance(one, DistributedSampler)), None)
