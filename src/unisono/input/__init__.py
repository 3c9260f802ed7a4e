"""How one host's input is split over its replicas."""

from unisono.input.arrays import ArrayDataset, numpy_dataset
from unisono.input.context import (
    DEFAULT_INPUT_OPTIONS,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
)
from unisono.input.counts import counts_of
from unisono.input.dataset import DistributedDataset
from unisono.input.element_spec import TensorSpec
from unisono.input.from_function import DistributedDatasetsFromFunction, values_from_function
from unisono.input.iterator import DistributedIterator, OptionalElement
from unisono.input.sharding import (
    AutoShardPolicy,
    even_sizes,
    filled_slices,
    fixed_sizes,
    legacy_sizes,
)

__all__ = [
    "DEFAULT_INPUT_OPTIONS",
    "ArrayDataset",
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "OptionalElement",
    "TensorSpec",
    "ValueContext",
    "counts_of",
    "even_sizes",
    "filled_slices",
    "fixed_sizes",
    "legacy_sizes",
    "numpy_dataset",
    "values_from_function",
]
