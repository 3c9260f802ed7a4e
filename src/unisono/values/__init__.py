"""Values with one component per replica."""

from unisono.values.counting import factors_of, weighed, weighed_tensor
from unisono.values.distributed import DistributedValues, Mirrored, Origin, PerReplica
from unisono.values.sparse import concatenate, is_sparse, sparse_of
from unisono.values.structure import (
    Tree,
    flatten,
    map_leaves,
    opened,
    regroup,
    select_replica,
    take_apart,
    tensors_of,
)
from unisono.values.tensor_like import TensorLike, as_tensor, replica_seen, set_replica_seen

__all__ = [
    "DistributedValues",
    "Mirrored",
    "Origin",
    "PerReplica",
    "TensorLike",
    "Tree",
    "as_tensor",
    "concatenate",
    "factors_of",
    "flatten",
    "is_sparse",
    "map_leaves",
    "opened",
    "regroup",
    "replica_seen",
    "select_replica",
    "set_replica_seen",
    "sparse_of",
    "take_apart",
    "tensors_of",
    "weighed",
    "weighed_tensor",
]
