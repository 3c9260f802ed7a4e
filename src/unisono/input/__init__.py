"""The input of a strategy, in four stages: source, split, place, prefetch."""

from unisono.input.arrays import ArrayDataset, numpy_dataset
from unisono.input.dataset import DistributedDataset
from unisono.input.element_spec import TensorSpec
from unisono.input.from_function import DistributedDatasetsFromFunction, values_from_function
from unisono.input.iterator import DistributedIterator, OptionalElement
from unisono.input.moving import filled
from unisono.input.options import (
    DEFAULT_INPUT_OPTIONS,
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
)
from unisono.input.splits import (
    copied,
    counts_of,
    even_sizes,
    filled_slices,
    fixed_sizes,
    tensorflow_sizes,
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
    "copied",
    "counts_of",
    "even_sizes",
    "filled",
    "filled_slices",
    "fixed_sizes",
    "numpy_dataset",
    "tensorflow_sizes",
    "values_from_function",
]
