"""The names of `tf.contrib.distribute`. Older names work, with a warning that gives the current
name.
"""

from typing import Any

import unisono as _unisono
from unisono.arguments import warn_of_older as _warn_of_older
from unisono.contrib import cross_device_ops as _ops
from unisono.contrib import towers as _towers
from unisono.contrib.cross_device_ops import AllReduceCrossDeviceOps
from unisono.contrib.steps import (
    DistributeConfig,
    Monitor,
    StandardInputStep,
    StandardSingleLossStep,
    Step,
)
from unisono.contrib.strategies import (
    CollectiveAllReduceStrategy,
    MirroredStrategy,
    MultiWorkerAllReduce,
    ParameterServerStrategy,
    TPUStrategy,
    run_standard_tensorflow_server,
)
from unisono.contrib.towers import CrossTowerOps, PerDevice
from unisono.workers import ConfigProto

__all__ = [
    "AllReduceCrossDeviceOps",
    "CollectiveAllReduceStrategy",
    "ConfigProto",
    "CrossTowerOps",
    "DistributeConfig",
    "MirroredStrategy",
    "Monitor",
    "MultiWorkerAllReduce",
    "ParameterServerStrategy",
    "PerDevice",
    "StandardInputStep",
    "StandardSingleLossStep",
    "Step",
    "TPUStrategy",
    "run_standard_tensorflow_server",
]

# Each older name, what to write today, and what stands for it if that is something else.
_OLDER_NAMES: dict[str, tuple[str, Any]] = {
    "AllReduceCrossTowerOps": ("contrib.AllReduceCrossDeviceOps", _towers.AllReduceCrossTowerOps),
    "CrossDeviceOps": ("CrossDeviceOps", _ops.ContribOps),
    "DistributionStrategy": ("Strategy", None),
    "DistributionStrategyExtended": ("StrategyExtended", None),
    "OneDeviceStrategy": ("OneDeviceStrategy", None),
    "ReductionToOneDeviceCrossDeviceOps": (
        "ReductionToOneDevice",
        _ops.ReductionToOneDeviceCrossDeviceOps,
    ),
    "ReductionToOneDeviceCrossTowerOps": (
        "ReductionToOneDevice",
        _towers.ReductionToOneDeviceCrossTowerOps,
    ),
    "ReplicaContext": ("ReplicaContext", None),
    "TowerContext": ("ReplicaContext", _towers.TowerContext),
    "get_cross_replica_context": ("in_cross_replica_context", _towers.get_cross_replica_context),
    "get_cross_tower_context": ("in_cross_replica_context", _towers.get_cross_replica_context),
    "get_distribution_strategy": ("get_strategy", None),
    "get_loss_reduction": ("get_strategy", _towers.get_loss_reduction),
    "get_replica_context": ("get_replica_context", None),
    "get_strategy": ("get_strategy", None),
    "get_tower_context": ("get_replica_context", _towers.get_tower_context),
    "has_distribution_strategy": ("has_strategy", None),
    "has_strategy": ("has_strategy", None),
    "in_cross_replica_context": ("in_cross_replica_context", None),
    "require_replica_context": ("get_replica_context", _towers.require_replica_context),
    "require_tower_context": ("get_replica_context", _towers.require_replica_context),
}


def __getattr__(name: str) -> Any:
    if name not in _OLDER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    today, older = _OLDER_NAMES[name]
    _warn_of_older(f"unisono.contrib.{name}", f"unisono.{today}")
    return older or getattr(_unisono, today)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OLDER_NAMES})
