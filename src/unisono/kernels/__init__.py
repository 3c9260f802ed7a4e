"""Combining the tensors of several replicas inside one memory."""

from unisono.kernels.batch import (
    combine_into,
    in_memory_order,
    reduce_batch,
    reduce_fused,
    reduce_into,
)
from unisono.kernels.checks import check_axes, check_gather, check_layout, check_replicas
from unisono.kernels.native import native_core
from unisono.kernels.tree import divide, result_dtype, tree_reduce, undivided, wide_dtype

__all__ = [
    "check_axes",
    "check_gather",
    "check_layout",
    "check_replicas",
    "combine_into",
    "divide",
    "in_memory_order",
    "native_core",
    "reduce_batch",
    "reduce_fused",
    "reduce_into",
    "result_dtype",
    "tree_reduce",
    "undivided",
    "wide_dtype",
]
