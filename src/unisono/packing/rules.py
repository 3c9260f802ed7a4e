"""How a batch is packed: by number, by small tensors, by bytes, or not at all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from unisono.errors import UnsupportedError
from unisono.packing.grouping import group_by_bytes, group_small, split_evenly
from unisono.packing.layout import PackLayout, Spec, by_dtype


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
        return functools.reduce(PackLayout.joined, splits, PackLayout(tuple(specs), ()))


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
