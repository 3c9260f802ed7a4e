"""Buffers that are copied and compared one by one, and what replicas have written to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.variables.leaves import version_of


@dataclass(eq=False)
class LooseBuffer:
    """A buffer on its own: the primary's, each replica's, and how often each had been written to.

    Of some, torch does not count all writes: observers of quantization write without, and `.data`
    does. So their values are compared. On many workers, where all must find the same, they count as
    written while the modules that own them train.
    """

    primary: Tensor
    is_compared: bool
    owners: list[int]
    stamp: tuple[int, int] = (-1, -1)
    parts: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def give(self, places: Sequence[torch.device], *, is_forced: bool) -> bool:
        """Gives the replicas what the primary has, and returns whether they need other tensors."""
        stamp = (self.primary.data_ptr(), version_of(self.primary))
        if not is_forced and stamp == self.stamp:
            return False
        can_stay = bool(self.parts) and all(is_like(part, self.primary) for part in self.parts)
        if can_stay:
            for part in self.parts:
                part.copy_(self.primary.detach())
        else:
            self.parts = [self.primary.detach().to(place, copy=True) for place in places]
        self.versions = [version_of(part) for part in self.parts]
        self.stamp = stamp
        return not can_stay

    def is_written(self, *, by_others: bool) -> bool:
        """Whether a replica has written to it, without a resize; `by_others`: or may have."""
        if any(part.shape != self.primary.shape for part in self.parts):
            return False
        if self.versions != [version_of(part) for part in self.parts]:
            return True
        if not self.is_compared:
            return False
        return by_others or not all(torch.equal(p.cpu(), self.primary.cpu()) for p in self.parts)


class Written(NamedTuple):
    """What replicas have written to their buffers.

    Attributes:
        replaced: Buffers of replicas, and like tensors that replicas have put in their place.
        others: Those that became something else, by the place of their module, and their name.
        loose: The large ones that were written to.
        are_flats: Whether a small one was.
    """

    replaced: list[tuple[Tensor, Tensor]]
    others: list[tuple[int, str]]
    loose: list[LooseBuffer]
    are_flats: bool


def is_like(found: Tensor | None, given: Tensor | None) -> bool:
    """Whether a tensor can stand in the place of another one."""
    if found is None or given is None:
        return found is given
    return (
        found.shape == given.shape and found.dtype == given.dtype and found.layout is given.layout
    )
