"""The names of `tf.contrib.distribute`; older ones still work and say what they are called now."""

import warnings
from typing import Any

from unisono.contrib import cross_device_ops as _device_ops
from unisono.contrib import cross_tower_ops as _tower_ops
from unisono.contrib.collective_all_reduce import CollectiveAllReduceStrategy
from unisono.contrib.cross_device_ops import AllReduceCrossDeviceOps
from unisono.contrib.cross_tower_ops import CrossTowerOps
from unisono.contrib.per_device import PerDevice
from unisono.strategies import ConfigProto

__all__ = [
    "AllReduceCrossDeviceOps",
    "CollectiveAllReduceStrategy",
    "ConfigProto",
    "CrossTowerOps",
    "PerDevice",
]

# Each older name, what stands for it, and what to write today.
_OLDER_NAMES: dict[str, tuple[type, str]] = {
    "AllReduceCrossTowerOps": (
        _tower_ops.AllReduceCrossTowerOps,
        "unisono.contrib.AllReduceCrossDeviceOps",
    ),
    "CrossDeviceOps": (_device_ops.ContribOps, "unisono.CrossDeviceOps"),
    "ReductionToOneDeviceCrossDeviceOps": (
        _device_ops.ReductionToOneDeviceCrossDeviceOps,
        "unisono.ReductionToOneDevice",
    ),
    "ReductionToOneDeviceCrossTowerOps": (
        _tower_ops.ReductionToOneDeviceCrossTowerOps,
        "unisono.ReductionToOneDevice",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _OLDER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    older, today = _OLDER_NAMES[name]
    warnings.warn(
        f"`unisono.contrib.{name}` is an older name; write `{today}`.",
        DeprecationWarning,
        stacklevel=2,
    )
    return older
