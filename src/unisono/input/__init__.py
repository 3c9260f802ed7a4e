"""The input of a strategy, in four stages: source, split, place, prefetch."""

from unisono.input.arrays import ArrayDataset, numpy_dataset
from unisono.input.dataset import DistributedDataset
from unisono.input.element_spec import TensorSpec
from unisono.input.from_function import DistributedDatasetsFromFunction, values_from_function
from unisono.input.iterator import DistributedIterator, OptionalElement
from unisono.input.lockstep import filled
from unisono.input.options import (
    DEFAULT_INPUT_OPTIONS,
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
)
from unisono.input.splits.sizes import counts_of
from unisono.input.splits.splitter import copied

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
    "filled",
    "numpy_dataset",
    "values_from_function",
]
