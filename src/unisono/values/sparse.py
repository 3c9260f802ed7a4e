"""Sparse COO tensors of several replicas: concatenated, never added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.kernels import divide
from unisono.options import ReduceOp

# Of these, `divide` returns the quotient as torch computes it, on the host.
_DIVIDED_IN_PLACE = frozenset((torch.float32, torch.float64))


def is_sparse(tensor: Tensor) -> bool:
    """Whether `tensor` is sparse COO, the layout of sparse gradients."""
    return tensor.layout is torch.sparse_coo


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Returns the dense tensors that a tensor consists of."""
    return [tensor._indices(), tensor._values()] if is_sparse(tensor) else [tensor]


def concatenate(op: ReduceOp, tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum or mean of sparse tensors that are in one memory.

    Indices and values are concatenated in replica order, with duplicates, so the result is not
    coalesced. Made dense, it equals the dense reduction.
    """
    check_sparse_op(op)
    sparse_dims = [tensor.sparse_dim() for tensor in tensors]
    if len(set(sparse_dims)) > 1:
        raise ReplicaMismatchError(
            f"Sparse tensors must have the same number of sparse dimensions on all {len(tensors)} "
            f"replicas, got {sparse_dims} by replica. Make them alike, or call `.to_dense()`."
        )
    parts = [tensor.detach() for tensor in tensors]
    indices = torch.cat([part._indices() for part in parts], dim=1)
    values = torch.cat([part._values() for part in parts])
    if op is ReduceOp.MEAN and len(parts) > 1:
        if values.dtype in _DIVIDED_IN_PLACE and not values.is_cuda:
            values.div_(len(parts))
        else:
            values = divide(values, len(parts), values.dtype)
    is_coalesced = len(parts) == 1 and parts[0].is_coalesced()
    return with_parts(parts[0], indices, values, is_coalesced=is_coalesced)


def check_sparse_op(op: ReduceOp) -> None:
    """Raises unless sparse tensors can be reduced with `op`."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise UnsupportedError(
            f"Sparse tensors can be reduced with {ReduceOp.SUM} and {ReduceOp.MEAN}, not {op}. "
            "Call `.to_dense()` first."
        )


def with_parts(like: Tensor, indices: Tensor, values: Tensor, *, is_coalesced: bool) -> Tensor:
    """Returns a sparse tensor with the shape of `like`, from valid indices and values."""
    return sparse_of(like.sparse_dim(), like.shape, indices, values, is_coalesced=is_coalesced)


def sparse_of(
    sparse_dim: int, shape: torch.Size, indices: Tensor, values: Tensor, *, is_coalesced: bool
) -> Tensor:
    """Returns a sparse tensor from valid indices and values."""
    # The public function would check, or warn that it does not.
    make: Any = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors
    made: Tensor = make(
        sparse_dim,
        len(shape) - sparse_dim,
        shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=is_coalesced,
    )
    return made
