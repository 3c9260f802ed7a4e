"""Packs many tensors into few flat buffers."""

from unisono.packing.packs import (
    BYTES_PER_PACK,
    BytesPerPack,
    Line,
    NoPacking,
    NumPacks,
    PackingRule,
    PackLayout,
    Segment,
    SmallGroups,
    Spec,
    best_bytes_per_pack,
    by_dtype,
    group_by_bytes,
)

__all__ = [
    "BYTES_PER_PACK",
    "BytesPerPack",
    "Line",
    "NoPacking",
    "NumPacks",
    "PackLayout",
    "PackingRule",
    "Segment",
    "SmallGroups",
    "Spec",
    "best_bytes_per_pack",
    "by_dtype",
    "group_by_bytes",
]
