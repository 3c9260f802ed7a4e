"""Values with one component per replica."""

from unisono.values.counting import factors_of, weighed, weighed_tensor
from unisono.values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    components_of,
    version_of,
)
from unisono.values.sparse import concatenate, is_sparse, parts_of, sparse_of, with_parts
from unisono.values.structure import (
    Tree,
    flatten,
    map_leaves,
    map_tensors,
    opened,
    regroup,
    select_replica,
    take_apart,
    tensors_of,
)
from unisono.values.tensor_like import TensorLike, as_tensor, set_replica_seen

__all__ = [
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "TensorLike",
    "Tree",
    "as_tensor",
    "components_of",
    "concatenate",
    "factors_of",
    "flatten",
    "is_sparse",
    "map_leaves",
    "map_tensors",
    "opened",
    "parts_of",
    "regroup",
    "select_replica",
    "set_replica_seen",
    "sparse_of",
    "take_apart",
    "tensors_of",
    "version_of",
    "weighed",
    "weighed_tensor",
    "with_parts",
]
