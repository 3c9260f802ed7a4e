"""Cross-device operations: an algorithm, a packing rule, and values in and out.

Those that send packs between memories are loaded when somebody names them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from unisono.reductions.scheduled import AccumulationFn, Ends, Prices, ReductionToOneDevice
from unisono.reductions.selection import (
    choose_cross_device_ops,
    predicted_cost,
    select_cross_device_ops,
)
from unisono.reductions.workers import ReplicaLayout, Workers, dealt

if TYPE_CHECKING:
    from unisono.reductions.all_reduce import AllReduce, HierarchicalCopyAllReduce
    from unisono.reductions.nccl import NcclAllReduce

__all__ = [
    "AccumulationFn",
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


def _load(name: str) -> Any:
    """Returns a reduction between memories, which Python asks for when it is not here yet."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unisono.reductions import all_reduce, nccl

    return getattr(nccl if hasattr(nccl, name) else all_reduce, name)


if not TYPE_CHECKING:
    # A type checker that sees it takes every name to be there.
    __getattr__ = _load
