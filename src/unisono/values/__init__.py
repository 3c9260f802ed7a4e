"""What replicas hold."""

from unisono.values.distributed import DistributedValues, Mirrored, PerReplica
from unisono.values.sparse import concatenate, is_sparse
from unisono.values.structure import flatten, map_leaves, regroup, select_replica
from unisono.values.tensors import as_tensor

__all__ = [
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "as_tensor",
    "concatenate",
    "flatten",
    "is_sparse",
    "map_leaves",
    "regroup",
    "select_replica",
]
