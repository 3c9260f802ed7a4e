"""The tensors of buffers on all replicas, and how they become one.

A mean is taken in float64 and rounded once, in the order of all sums. So values that are the same
on all replicas keep their bits, and the result does not depend on who has which replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.options import ReduceOp
from unisono.reductions import Workers
from unisono.torch_private import copy_each
from unisono.values import version_of

_WIDE = torch.float64
# Vector units and libraries for GPUs like the beginning of a tensor to be aligned.
_ALIGNMENT_BYTES = 16


class Flat:
    """Small buffers of one dtype: the primaries, and all of them in one tensor per replica."""

    def __init__(self, primaries: Sequence[Tensor], places: tuple[torch.device, ...]) -> None:
        self.dtype = primaries[0].dtype
        step = max(1, _ALIGNMENT_BYTES // self.dtype.itemsize)
        padding = torch.zeros(step, dtype=self.dtype, device=places[0])
        # What is put end to end, and where each of the primaries begins there.
        self._sources: list[Tensor] = []
        self._starts: dict[int, int] = {}
        length = 0
        for primary in primaries:
            self._starts[id(primary)] = length
            rest = -primary.numel() % step if self.dtype.is_floating_point else 0
            self._sources += [primary.detach().view(-1), padding[:rest]]
            length += primary.numel() + rest
        # On the first place: what the replicas begin with, and then what they become.
        self.whole = torch.empty(length, dtype=self.dtype, device=places[0])
        self.parts = [torch.empty(length, dtype=self.dtype, device=place) for place in places]
        self._targets = [primary.detach().view(-1) for primary in primaries]
        self._results = [self.view_of(self.whole, primary).view(-1) for primary in primaries]

    def view_of(self, flat: Tensor, primary: Tensor) -> Tensor:
        """Returns what stands in `flat` for a primary: a tensor that counts its own writes."""
        start = self._starts[id(primary)]
        return flat[start : start + primary.numel()].view(primary.shape).data

    def give(self) -> None:
        """Gives the replicas the values of the primaries, however they were written."""
        torch.cat(self._sources, out=self.whole)
        for part in self.parts:
            part.copy_(self.whole)

    def differs(self) -> bool:
        """Whether a replica, on the host, has other bits than it was given."""
        # The widest integers are compared fastest.
        kind = torch.int64 if self.whole.nbytes % 8 == 0 else torch.uint8
        given = self.whole.view(kind)
        return not all(torch.equal(part.view(kind), given) for part in self.parts)

    def write(self) -> None:
        """Gives the primaries what they have become."""
        copy_each(self._targets, self._results)


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
        self.versions = list(map(version_of, self.parts))
        self.stamp = stamp
        return not can_stay

    def is_written(self, *, by_others: bool) -> bool:
        """Whether a replica has written to it, without a resize; `by_others`: or may have."""
        if any(part.shape != self.primary.shape for part in self.parts):
            return False
        if self.versions != list(map(version_of, self.parts)):
            return True
        if not self.is_compared:
            return False
        return by_others or not all(torch.equal(p.cpu(), self.primary.cpu()) for p in self.parts)

    def bring_together(self, weights: Sequence[float], workers: Workers) -> None:
        """Gives the primary what the replicas have together."""
        combined = combined_of(self.parts, weights, workers)
        with torch.inference_mode(mode=self.primary.is_inference()):
            if self.primary.shape != combined.shape:
                self.primary.resize_(combined.shape)
            self.primary.copy_(combined)


class Written(NamedTuple):
    """What replicas have written to their buffers."""

    # Buffers of replicas, and like tensors that replicas have put in their place.
    replaced: list[tuple[Tensor, Tensor]]
    # Those that became something else, by the place of their module, and their name.
    others: list[tuple[int, str]]
    # The large ones that were written to, and whether a small one was.
    loose: list[LooseBuffer]
    are_flats: bool


def is_like(found: Tensor | None, given: Tensor | None) -> bool:
    """Whether a tensor can stand in the place of another one."""
    if found is None or given is None:
        return found is given
    return (
        found.shape == given.shape and found.dtype == given.dtype and found.layout is given.layout
    )


def bring_together(flats: Sequence[Flat], weights: Sequence[float], workers: Workers) -> None:
    """Gives the primaries of flats the means of floats, and all else of replica 0."""
    floats = [flat for flat in flats if flat.dtype.is_floating_point]
    others = [flat for flat in flats if not flat.dtype.is_floating_point]
    firsts = [flat.parts[0] for flat in others]
    # What all workers take of the chief, as numbers that can be added to zeros: its bytes.
    numbers = [one.view(torch.uint8).to(_WIDE) for one in firsts] if workers.are_many else []
    parts = [[flat.parts[i] for flat in floats] for i in range(len(weights))]
    means, chosen = _means(parts, weights, workers, numbers)
    if workers.are_many:
        firsts = [one.to(torch.uint8) for one in chosen]
    for flat, found in zip((*floats, *others), (*means, *firsts), strict=True):
        flat.whole.copy_(found if found.dtype != torch.uint8 else found.view(flat.dtype))
    for flat in flats:
        flat.write()


def combined_of(parts: Sequence[Tensor], weights: Sequence[float], workers: Workers) -> Tensor:
    """Returns the mean of a buffer over all replicas that had samples; else that of replica 0."""
    first = parts[0]
    if not first.is_floating_point() or first.layout is not torch.strided:
        return workers.of_chief(first)
    (mean,), _ = _means([[part.reshape(-1)] for part in parts], weights, workers, [])
    return mean.to(first.dtype).view(first.shape).to(first.device)


def _means(
    parts: Sequence[Sequence[Tensor]],
    weights: Sequence[float],
    workers: Workers,
    chosen: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the mean of each vector over samples, in float64, and `chosen` of the chief."""
    home = parts[0][0].device if parts[0] else torch.device("cpu")
    place = home if workers.takes(home) else torch.device("cpu")
    packs = []
    for i, (own, weight) in enumerate(zip(parts, weights, strict=True)):
        # Not made of a Python list, for which a GPU would be waited for.
        ones = torch.full((1,), weight, dtype=_WIDE, device=place)
        is_first = i == 0 and workers.rank == 0
        given = [(part, weight) for part in own] + [(one, float(is_first)) for one in chosen]
        # What does not count may be anything, also infinite.
        weighed = (
            one if share == 1 else one.to(_WIDE) * share if share else torch.zeros_like(one)
            for one, share in ((one.to(place), share) for one, share in given)
        )
        packs.append(torch.cat([ones, *weighed]))
    total = workers.combine(ReduceOp.SUM, packs)
    sizes = [one.numel() for one in (*parts[0], *chosen)]
    sums = total[1:].split(sizes) if sizes else ()
    means = [one / total[0] for one in sums[: len(parts[0])]]
    for i, mean in enumerate(means):
        if parts[0][i].dtype == _WIDE and mean.numel():
            vectors = [own[i].to(place) for own in parts]
            means[i] = _exact(mean, vectors, weights, workers)
    return means, list(sums[len(means) :])


def _exact(
    mean: Tensor, vectors: Sequence[Tensor], weights: Sequence[float], workers: Workers
) -> Tensor:
    """Keeps the bits of values on which all agree, where float64 itself is to be averaged."""
    ends = []
    for op, neutral in ((ReduceOp.MIN, torch.inf), (ReduceOp.MAX, -torch.inf)):
        given = [
            vector if weight else torch.full_like(vector, neutral)
            for vector, weight in zip(vectors, weights, strict=True)
        ]
        ends.append(workers.combine(op, given))
    return torch.where(ends[0] == ends[1], ends[0], mean)
