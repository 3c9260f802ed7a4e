"""What replicas hold."""

from unisono.values.distributed import DistributedValues, Mirrored, PerReplica
from unisono.values.sparse import concatenate, is_sparse
from unisono.values.structure import (
    flatten,
    map_leaves,
    regroup,
    select_replica,
    tensors_of,
    too_deep,
)
from unisono.values.tensor_like import TensorLike, replica_seen, set_replica_seen
from unisono.values.tensors import as_tensor

__all__ = [
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "TensorLike",
    "as_tensor",
    "concatenate",
    "flatten",
    "is_sparse",
    "map_leaves",
    "regroup",
    "replica_seen",
    "select_replica",
    "set_replica_seen",
    "tensors_of",
    "too_deep",
]
