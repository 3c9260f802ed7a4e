"""How a batch is packed: by number, by small tensors, by bytes, or not at all.

A rule is a pure function of sizes, so every replica makes the same packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from unisono.errors import UnsupportedError
from unisono.packing.layout import PackLayout, Spec, by_dtype


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
        joins = small and index > 0 and is_small[index - 1] and len(runs[-1]) < max_group
        if joins:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [run for run in runs if len(run) > 1] + [run for run in runs if len(run) == 1]


class PackingRule(Protocol):
    """Turns the tensors of a batch into packs."""

    def layout(self, specs: Sequence[Spec]) -> PackLayout:
        """Returns the packs for tensors of these shapes and dtypes."""


@dataclass(frozen=True)
class NoPacking:
    """Each tensor is sent alone."""

    def layout(self, specs: Sequence[Spec]) -> PackLayout:
        """See `PackingRule.layout`."""
        return PackLayout.of_groups(specs, [[i] for i in range(len(specs))])


@dataclass(frozen=True)
class NumPacks:
    """All tensors of a dtype are concatenated and split into `num_packs` packs."""

    num_packs: int

    def layout(self, specs: Sequence[Spec]) -> PackLayout:
        """See `PackingRule.layout`."""
        splits = [
            PackLayout.of_splits(
                specs,
                group,
                split_evenly(sum(specs[i].num_elements for i in group), self.num_packs),
            )
            for group in by_dtype(specs, range(len(specs)))
        ]
        return PackLayout(tuple(specs), tuple(pack for one in splits for pack in one.packs))


@dataclass(frozen=True)
class SmallGroups:
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
        """See `PackingRule.layout`."""
        is_small = [
            spec.dtype == torch.float32 and spec.num_bytes <= self.max_bytes for spec in specs
        ]
        return PackLayout.of_groups(specs, group_small(is_small, self.max_group))


@dataclass(frozen=True)
class BytesPerPack:
    """Packs of a little more than `bytes_per_pack`, the last tensors first."""

    bytes_per_pack: int

    def layout(self, specs: Sequence[Spec]) -> PackLayout:
        """See `PackingRule.layout`."""
        last = len(specs) - 1
        sizes = [spec.num_bytes for spec in reversed(specs)]
        groups = group_by_bytes(sizes, self.bytes_per_pack)
        return PackLayout.of_groups(specs, [[last - i for i in group] for group in groups])
