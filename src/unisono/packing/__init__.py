"""Packs many tensors into few flat buffers."""

from unisono.packing.packs import (
    BytesPerPack,
    NoPacking,
    NumPacks,
    PackingRule,
    PackLayout,
    Segment,
    SmallGroups,
    Spec,
    by_dtype,
    group_by_bytes,
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
]
