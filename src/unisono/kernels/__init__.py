"""Combining the tensors of several replicas inside one memory."""

from unisono.kernels.batch import reduce_batch, reduce_into, reduce_native
from unisono.kernels.checks import check_replicas
from unisono.kernels.native import NativeCore, native_core
from unisono.kernels.tree import divide, result_dtype, tree_reduce, wide_dtype

__all__ = [
    "NativeCore",
    "check_replicas",
    "divide",
    "native_core",
    "reduce_batch",
    "reduce_into",
    "reduce_native",
    "result_dtype",
    "tree_reduce",
    "wide_dtype",
]
