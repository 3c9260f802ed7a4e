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
from unisono.packing.sizes import BYTES_PER_PACK, Line, best_bytes_per_pack

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
