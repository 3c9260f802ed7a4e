"""What a source of batches can do."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from unisono.errors import UnsupportedError

Skip: TypeAlias = Callable[[], int]


class Source(ABC):
    """Gives the batches of one epoch after another.

    Attributes:
        is_alone: Whether drawing a batch from an open epoch leaves the global random generators
            of this process alone, so that it may be done at any time and on any thread.
        has_one_epoch: Whether opening an epoch ends the one before.
        drops_rest: Whether its batches are all of one size because the rest was dropped.
    """

    generators: tuple[torch.Generator, ...] = ()
    is_alone: bool = False
    has_one_epoch: bool = False
    drops_rest: bool = False
    batch_size: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether something is kept from an earlier epoch that changes how the next one opens."""
        return False

    @property
    def num_samples(self) -> int | None:
        """How many samples an epoch has, if it says so."""
        return None

    @abstractmethod
    def open(self) -> Iterator[Any]:
        """Begins an epoch."""

    def start(self) -> None:
        """Makes it keep what it keeps from epoch to epoch."""
        raise UnsupportedError(
            "The saved state is of a `DataLoader` with `persistent_workers=True`, and this one has "
            "other settings. Resume with the same `DataLoader` settings."
        )

    def reopen(self, num_consumed: int, *, refetch: bool) -> tuple[Iterator[Any], Skip]:
        """Begins an epoch; also returns a function that skips what an earlier epoch has consumed.

        The function returns how many batches it found, which are fewer at the end of the input.

        `refetch` asks for the same bits even where the source keeps random generators in other
        processes, at the price of fetching again what was consumed.
        """
        del refetch
        batches = self.open()
        return batches, lambda: drop(batches, num_consumed)

    def __len__(self) -> int:
        raise TypeError(
            f"{type(self).__name__} does not know how many batches it gives. Iterate without "
            "`len()`."
        )


def drop(items: Iterator[Any], count: int) -> int:
    """Draws `count` items that an earlier epoch has consumed, and returns how many there were."""
    return sum(1 for _ in itertools.islice(items, count))
