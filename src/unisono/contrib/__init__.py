"""The names of `tf.contrib.distribute`. Older names work, with a warning that gives the current
name.
"""

from typing import Any

import unisono.strategies as _today
from unisono import contexts as _contexts_today
from unisono.arguments import warn_of_older as _warn_of_older
from unisono.contrib import contexts as _contexts
from unisono.contrib import cross_device_ops as _device_ops
from unisono.contrib import cross_tower_ops as _tower_ops
from unisono.contrib.cross_device_ops import AllReduceCrossDeviceOps
from unisono.contrib.cross_tower_ops import CrossTowerOps, PerDevice
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
from unisono.strategies import ConfigProto

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

_GET_REPLICA_CONTEXT = "unisono.get_replica_context"
_IN_CROSS_REPLICA_CONTEXT = "unisono.in_cross_replica_context"
# Each older name, what stands for it, and what to write today.
_OLDER_NAMES: dict[str, tuple[Any, str]] = {
    "AllReduceCrossTowerOps": (
        _tower_ops.AllReduceCrossTowerOps,
        "unisono.contrib.AllReduceCrossDeviceOps",
    ),
    "CrossDeviceOps": (_device_ops.ContribOps, "unisono.CrossDeviceOps"),
    "DistributionStrategy": (_today.Strategy, "unisono.Strategy"),
    "DistributionStrategyExtended": (_today.StrategyExtended, "unisono.StrategyExtended"),
    "OneDeviceStrategy": (_today.OneDeviceStrategy, "unisono.OneDeviceStrategy"),
    "ReductionToOneDeviceCrossDeviceOps": (
        _device_ops.ReductionToOneDeviceCrossDeviceOps,
        "unisono.ReductionToOneDevice",
    ),
    "ReductionToOneDeviceCrossTowerOps": (
        _tower_ops.ReductionToOneDeviceCrossTowerOps,
        "unisono.ReductionToOneDevice",
    ),
    "ReplicaContext": (_contexts_today.ReplicaContext, "unisono.ReplicaContext"),
    "TowerContext": (_contexts.TowerContext, "unisono.ReplicaContext"),
    "get_cross_replica_context": (_contexts.get_cross_replica_context, _IN_CROSS_REPLICA_CONTEXT),
    "get_cross_tower_context": (_contexts.get_cross_replica_context, _IN_CROSS_REPLICA_CONTEXT),
    "get_distribution_strategy": (_contexts_today.get_strategy, "unisono.get_strategy"),
    "get_loss_reduction": (_contexts.get_loss_reduction, "unisono.get_strategy"),
    "get_replica_context": (_contexts_today.get_replica_context, _GET_REPLICA_CONTEXT),
    "get_strategy": (_contexts_today.get_strategy, "unisono.get_strategy"),
    "get_tower_context": (_contexts.get_tower_context, _GET_REPLICA_CONTEXT),
    "has_distribution_strategy": (_contexts_today.has_strategy, "unisono.has_strategy"),
    "has_strategy": (_contexts_today.has_strategy, "unisono.has_strategy"),
    "in_cross_replica_context": (
        _contexts_today.in_cross_replica_context,
        _IN_CROSS_REPLICA_CONTEXT,
    ),
    "require_replica_context": (_contexts.require_replica_context, _GET_REPLICA_CONTEXT),
    "require_tower_context": (_contexts.require_replica_context, _GET_REPLICA_CONTEXT),
}


def __getattr__(name: str) -> Any:
    if name not in _OLDER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    older, today = _OLDER_NAMES[name]
    _warn_of_older(f"unisono.contrib.{name}", today)
    return older


def __dir__() -> list[str]:
    return sorted({*globals(), *_OLDER_NAMES})
