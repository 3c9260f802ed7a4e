"""Packs many tensors into few flat buffers."""

from unisono.packing.grouping import group_by_bytes, group_small, split_evenly
from unisono.packing.layout import PackLayout, Segment, Spec, by_dtype
from unisono.packing.rules import BytesPerPack, NoPacking, NumPacks, PackingRule, SmallGroups

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
