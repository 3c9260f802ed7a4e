"""What batches come from: loaders, iterables, iterators and functions, opened again each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from unisono.errors import UnsupportedError
from unisono.input.sources.loaders import LoaderSource
from unisono.input.sources.source import Source


class IterableSource(Source):
    """Anything that gives all its batches each time it is iterated."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def open(self) -> Iterator[Any]:
        return iter(self._batches)

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
        return _Calls(self._function)


class _Calls(Iterator[Any]):
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __next__(self) -> Any:
        return self._function()


def as_source(batches: Any) -> Source:
    """Says how to draw batches from what a user gave."""
    if isinstance(batches, Source):
        return batches
    if isinstance(batches, DataLoader):
        return LoaderSource(batches)
    _refuse_what_is_no_batches(batches)
    if isinstance(batches, Iterator):
        return IteratorSource(batches)
    return IterableSource(batches)


def _refuse_what_is_no_batches(batches: Any) -> None:
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
            "`DataLoader(numpy_dataset(arrays), batch_size=global_batch_size)`, or make it a list "
            "if its items are batches."
        )
    if isinstance(batches, (str, bytes, Mapping)) or not isinstance(batches, Iterable):
        raise UnsupportedError(
            f"Input must be a `DataLoader` or an iterable of batches, got {batches!r} of type "
            f"{kind}."
        )
