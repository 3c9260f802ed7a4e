"""Synchronous data-parallel training for PyTorch, in the programming model of `tf.distribute`."""

from unisono import (
    backend,
    cluster_resolver,
    contrib,
    errors,
    experimental,
    hooks,
    testing,
    tracing,
)
from unisono.contexts import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from unisono.devices import Device
from unisono.functions import function
from unisono.input import (
    AutoShardPolicy,
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
    TensorSpec,
)
from unisono.options import ReduceOp, VariableAggregation
from unisono.reductions import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from unisono.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    RunOptions,
    Strategy,
    StrategyExtended,
)
from unisono.values import DistributedValues, Mirrored, PerReplica
from unisono.variables import Variable, VariableSynchronization, once

__version__ = "0.1.0"

__all__ = [
    "AutoShardPolicy",
    "CrossDeviceOps",
    "Device",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "TensorSpec",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "backend",
    "cluster_resolver",
    "contrib",
    "errors",
    "experimental",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "hooks",
    "in_cross_replica_context",
    "once",
    "testing",
    "tracing",
]

tracing.record_if_asked()
