"""The input of a strategy, in four stages: source, split, place, prefetch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.input.dataset import (
    ArrayDataset,
    DistributedDataset,
    numpy_dataset,
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
from unisono.sharing import names_of as _names_of

if TYPE_CHECKING:
    from unisono.input.from_function import DistributedDatasetsFromFunction, values_from_function
else:
    __getattr__ = _names_of(__name__, "from_function")

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
