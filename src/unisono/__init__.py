"""Synchronous data-parallel training for PyTorch, in the programming model of `tf.distribute`."""

from unisono import contrib, errors, experimental, testing
from unisono.devices import Device
from unisono.options import ReduceOp, VariableAggregation
from unisono.reductions import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from unisono.values import DistributedValues, Mirrored, PerReplica

__all__ = [
    "CrossDeviceOps",
    "Device",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "Mirrored",
    "NcclAllReduce",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "VariableAggregation",
    "contrib",
    "errors",
    "experimental",
    "testing",
]
