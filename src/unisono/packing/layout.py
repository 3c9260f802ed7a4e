"""Many tensors in few flat buffers, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.torch_private import copy_each, flatten_each, views_like


class Segment(NamedTuple):
    """The elements `start` to `stop` of the flattened tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


class Spec(NamedTuple):
    """What a layout needs to know of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Returns the shape and dtype of `tensor`."""
        return cls(tensor.shape, tensor.dtype)

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the elements."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class PackLayout:
    """Where each tensor of a batch is in which pack.

    A layout holds no tensor and never changes, so all replicas and threads can share it.
    """

    specs: tuple[Spec, ...]
    packs: tuple[tuple[Segment, ...], ...]

    @classmethod
    def of_groups(cls, specs: Sequence[Spec], groups: Iterable[Sequence[int]]) -> PackLayout:
        """Makes one pack per group, or one per dtype if a group has several dtypes."""
        packs = [
            tuple(Segment(i, 0, specs[i].num_elements) for i in same)
            for group in groups
            for same in by_dtype(specs, group)
        ]
        return cls(tuple(specs), tuple(packs))

    @classmethod
    def of_splits(
        cls, specs: Sequence[Spec], group: Sequence[int], sizes: Sequence[int]
    ) -> PackLayout:
        """Concatenates the tensors of one group, and splits the result into packs of `sizes`."""
        rest = [Segment(i, 0, specs[i].num_elements) for i in reversed(group)]
        packs = []
        for size in sizes:
            pack = []
            while rest and size >= (length := rest[-1].stop - rest[-1].start):
                pack.append(rest.pop())
                size -= length
            if size:
                tensor, start, stop = rest.pop()
                pack.append(Segment(tensor, start, start + size))
                rest.append(Segment(tensor, start + size, stop))
            # A pack without elements still has a dtype and a turn in the rotation of roots.
            packs.append(tuple(pack) or (Segment(group[0], 0, 0),))
        return cls(tuple(specs), tuple(packs))

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the packs of one replica's tensors. A single tensor is viewed, not copied."""
        if self._are_whole:
            return [flatten_each([tensors[i].detach() for i in own]) for own in self._members]
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        return [self._pack(segments, flat) for segments in self.packs]

    def _pack(self, segments: tuple[Segment, ...], flat: list[Tensor]) -> Tensor:
        pieces = [flat[tensor][start:stop] for tensor, start, stop in segments]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @functools.cached_property
    def _are_whole(self) -> bool:
        """Whether every pack holds several tensors, and every tensor is in one pack."""
        segments = [one for pack in self.packs for one in pack]
        has_several = all(len(pack) > 1 for pack in self.packs)
        return has_several and all(
            start == 0 and stop == self.specs[i].num_elements for i, start, stop in segments
        )

    @functools.cached_property
    def _members(self) -> list[list[int]]:
        """For each pack, the numbers of its tensors."""
        return [[segment.tensor for segment in pack] for pack in self.packs]

    def unpack(self, packs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors in `packs`, each with its own memory."""
        # Copies, so that no tensor keeps a whole pack alive.
        return self._unpacked(packs, Tensor.clone)

    def write(self, packs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copies what lies in `packs` into tensors that are there."""
        if not self._are_whole:
            copy_each(list(tensors), self._unpacked(packs, Tensor.detach))
            return
        for pack, numbers in zip(packs, self._members, strict=True):
            own = [tensors[i] for i in numbers]
            copy_each(own, views_like(pack, own))

    def _unpacked(self, packs: Sequence[Tensor], taken: Callable[[Tensor], Tensor]) -> list[Tensor]:
        pieces: list[list[Tensor]] = [[] for _ in self.specs]
        for segments, pack in zip(self.packs, packs, strict=True):
            lengths = [segment.stop - segment.start for segment in segments]
            parts = [pack] if len(lengths) == 1 else [taken(p) for p in pack.split(lengths)]
            for segment, part in zip(segments, parts, strict=True):
                pieces[segment.tensor].append(part)
        return [
            (parts[0] if len(parts) == 1 else torch.cat(parts)).view(spec.shape)
            for spec, parts in zip(self.specs, pieces, strict=True)
        ]


def by_dtype(specs: Sequence[Spec], group: Sequence[int]) -> list[list[int]]:
    """Splits a group by dtype, in the order in which the dtypes appear."""
    same: dict[torch.dtype, list[int]] = {}
    for index in group:
        same.setdefault(specs[index].dtype, []).append(index)
    return list(same.values())
