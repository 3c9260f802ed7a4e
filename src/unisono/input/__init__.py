"""The input of a strategy, in four stages: source, split, place, prefetch."""

from unisono.input.dataset import (
    ArrayDataset,
    DistributedDataset,
    DistributedDatasetsFromFunction,
    numpy_dataset,
    values_from_function,
)
from unisono.input.distributed_input import TensorSpec
from unisono.input.iterator import DistributedIterator, OptionalElement
from unisono.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
)
from unisono.input.split.layout import counts_of
from unisono.input.split.splitter import copied

__all__ = [
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
    "numpy_dataset",
    "values_from_function",
]
