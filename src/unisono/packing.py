"""Many tensors in few flat buffers and back, which tensors share a buffer, and how large it is.

A rule is a pure function of sizes, so every replica makes the same packs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from unisono.errors import UnsupportedError
from unisono.torch_private import copy_each, flatten_each, views_like

# Without constants: small enough that the first packs are reduced early in the pass, large enough
# that there are few.
BYTES_PER_PACK = 4 << 20
# For smaller packs, costs that the model leaves out matter: hooks, threads that wake up.
_LEAST_BYTES = 64 << 10
# A size at which latencies do not matter.
_FAR_BYTES = 1 << 40


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
        pieces = [[flat[i][start:stop] for i, start, stop in pack] for pack in self.packs]
        return [one[0] if len(one) == 1 else torch.cat(one) for one in pieces]

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


def split_evenly(num_elements: int, num_packs: int) -> list[int]:
    """Returns the sizes of `num_packs` packs; the last one takes what is left over.

    >>> split_evenly(8, 3), split_evenly(8, 5), split_evenly(2, 3)
    ([2, 2, 4], [1, 1, 1, 1, 4], [0, 0, 2])
    """
    if num_packs < 1:
        raise UnsupportedError(f"`num_packs` must be 1 or more to split, got {num_packs}.")
    size = num_elements // num_packs
    return [size] * (num_packs - 1) + [num_elements - size * (num_packs - 1)]


def group_by_bytes(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Groups tensors, given their bytes, into packs of a little more than `bytes_per_pack`.

    Tensors are taken in order. A pack is closed once it holds *more* than `bytes_per_pack`, so a
    pack of exactly that size takes one more tensor. 0 puts everything into one pack.

    >>> group_by_bytes([128, 32, 800, 4], 200)
    [[0, 1, 2], [3]]
    """
    if bytes_per_pack == 0:
        return [list(range(len(sizes)))]
    packs: list[list[int]] = []
    pack_bytes = 0
    for index, size in enumerate(sizes):
        if not packs or pack_bytes > bytes_per_pack:
            packs.append([])
            pack_bytes = 0
        packs[-1].append(index)
        pack_bytes += size
    return packs


def group_small(is_small: Sequence[bool], max_group: int) -> list[list[int]]:
    """Groups runs of consecutive small tensors, at most `max_group` per group.

    Groups come first, then single tensors, in order. A group of one counts as a single tensor.

    >>> group_small([True, True, False, True, True, True], 2)
    [[0, 1], [3, 4], [2], [5]]
    """
    runs: list[list[int]] = []
    for index, small in enumerate(is_small):
        if small and index > 0 and is_small[index - 1] and len(runs[-1]) < max_group:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [run for run in runs if len(run) > 1] + [run for run in runs if len(run) == 1]


class PackingRule(Protocol):
    """Turns the tensors of a batch into packs."""

    def layout(self, specs: Sequence[Spec]) -> PackLayout:
        """Returns the packs for tensors of these shapes and dtypes."""


@dataclass(frozen=True)
class NoPacking(PackingRule):
    """Each tensor is sent alone."""

    def layout(self, specs: Sequence[Spec]) -> PackLayout:
        return PackLayout.of_groups(specs, [[i] for i in range(len(specs))])


@dataclass(frozen=True)
class NumPacks(PackingRule):
    """All tensors of a dtype are concatenated and split into `num_packs` packs."""

    num_packs: int

    def layout(self, specs: Sequence[Spec]) -> PackLayout:
        packs: list[tuple[Segment, ...]] = []
        for group in by_dtype(specs, range(len(specs))):
            sizes = split_evenly(sum(specs[i].num_elements for i in group), self.num_packs)
            packs += PackLayout.of_splits(specs, group, sizes).packs
        return PackLayout(tuple(specs), tuple(packs))


@dataclass(frozen=True)
class SmallGroups(PackingRule):
    """Consecutive float32 tensors of at most `max_bytes` share a pack, `max_group` per pack."""

    max_bytes: int
    max_group: int

    def __post_init__(self) -> None:
        if self.max_bytes <= 0 or self.max_group <= 0:
            raise UnsupportedError(
                "Small tensors are grouped when `max_bytes` and `max_group` are above 0, got "
                f"{self.max_bytes} and {self.max_group}."
            )

    def layout(self, specs: Sequence[Spec]) -> PackLayout:
        is_small = [
            spec.dtype == torch.float32 and spec.num_bytes <= self.max_bytes for spec in specs
        ]
        return PackLayout.of_groups(specs, group_small(is_small, self.max_group))


@dataclass(frozen=True)
class BytesPerPack(PackingRule):
    """Packs of a little more than `bytes_per_pack`, the last tensors first."""

    bytes_per_pack: int

    def layout(self, specs: Sequence[Spec]) -> PackLayout:
        last = len(specs) - 1
        sizes = [spec.num_bytes for spec in reversed(specs)]
        groups = group_by_bytes(sizes, self.bytes_per_pack)
        return PackLayout.of_groups(specs, [[last - i for i in group] for group in groups])


class Line(NamedTuple):
    """Seconds as a linear function of bytes."""

    latency: float
    per_byte: float

    @classmethod
    def through(cls, seconds: Callable[[float], float]) -> Line:
        """Returns the line from an empty tensor to a huge one, given the seconds for some bytes."""
        latency = seconds(0)
        return cls(latency, (seconds(_FAR_BYTES) - latency) / _FAR_BYTES)

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds for this number of bytes."""
        return self.latency + self.per_byte * num_bytes


def best_bytes_per_pack(cost: Line | None, total_bytes: int) -> int:
    """Returns the best size of packs for the gradients of a model.

    A pack costs a latency `a` and `b` seconds per byte. N bytes of gradients in packs of m bytes
    cost N / m latencies. The last pack is full when the backward pass ends, so its m b seconds
    overlap with nothing. N / m a + m b is least for m = sqrt(N a / b).

    Args:
        cost: The cost of reducing a pack, or None if it is not known.
        total_bytes: The gradients of one replica.
    """
    if cost is None or cost.per_byte <= 0:
        return BYTES_PER_PACK
    return max(_LEAST_BYTES, round(math.sqrt(total_bytes * cost.latency / cost.per_byte)))
