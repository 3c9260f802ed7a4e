"""Packs many tensors into few flat buffers."""

from unisono.packing.layout import PackLayout, Segment, Spec, by_dtype
from unisono.packing.rules import (
    BytesPerPack,
    NoPacking,
    NumPacks,
    PackingRule,
    SmallGroups,
    group_by_bytes,
    group_small,
    split_evenly,
)

__all__ = [
    "BytesPerPack",
    "NoPacking",
    "NumPacks",
    "PackLayout",
    "PackingRule",
    "Segment",
    "SmallGroups",
    "Spec",
    "by_dtype",
    "group_by_bytes",
    "group_small",
    "split_evenly",
]
