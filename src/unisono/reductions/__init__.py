"""Cross-device operations: an algorithm, a packing rule, and values in and out.

Those that send packs between memories are loaded when somebody names them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.reductions.cross_device_ops import (
    CrossDeviceOps,
    Pair,
    Result,
    always_mirrored,
    check_ops,
    listed_pairs,
    mirrored,
)
from unisono.reductions.destinations import Destinations, destinations_of, listed_destinations
from unisono.reductions.scheduled import Ends, Prices, ReductionToOneDevice
from unisono.reductions.selection import (
    choose_cross_device_ops,
    predicted_cost,
    select_cross_device_ops,
)
from unisono.reductions.workers import ReplicaLayout, Workers, dealt
from unisono.sharing import names_of as _names_of

if TYPE_CHECKING:
    from unisono.reductions.all_reduce import AllReduce, HierarchicalCopyAllReduce
    from unisono.reductions.nccl import NcclAllReduce
else:
    __getattr__ = _names_of(__name__, "nccl", "all_reduce")

__all__ = [
    "AllReduce",
    "CrossDeviceOps",
    "Destinations",
    "Ends",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "Pair",
    "Prices",
    "ReductionToOneDevice",
    "ReplicaLayout",
    "Result",
    "Workers",
    "always_mirrored",
    "check_ops",
    "choose_cross_device_ops",
    "dealt",
    "destinations_of",
    "listed_destinations",
    "listed_pairs",
    "mirrored",
    "predicted_cost",
    "select_cross_device_ops",
]
