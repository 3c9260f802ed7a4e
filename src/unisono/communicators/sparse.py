"""Sparse gradients between ranks: everybody gets the rows of everybody."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator
from unisono.communicators.headers import ranks_in_words
from unisono.errors import UnequalCollectivesError
from unisono.kernels import divide
from unisono.options import ReduceOp
from unisono.values.sparse import check_sparse_op, concatenate, with_parts


def all_reduce_sparse(
    communicator: Communicator, op: ReduceOp, tensor: Tensor, count: int | None = None
) -> Tensor:
    """Returns the sum or mean of sparse COO tensors, one per rank, with any number of rows.

    Indices and values are put end to end in the order of the ranks and duplicates are kept; made
    dense, the result equals the dense reduction.
    """
    check_sparse_op(op)
    own = tensor.detach()
    shape = [own.sparse_dim(), *own.shape]
    # The shape travels in front of the indices, which saves a collective.
    header = torch.tensor([len(shape), *shape], device=own.device)
    described = communicator.all_gather(torch.cat([header, own._indices().flatten()]))
    values = communicator.all_gather(own._values())
    shapes = [one[1 : int(one[0]) + 1].tolist() for one in described]
    _check_shapes(shapes)
    parts = [
        with_parts(own, one[len(shape) + 1 :].view(shape[0], -1), value, is_coalesced=False)
        for one, value in zip(described, values, strict=True)
    ]
    total = concatenate(ReduceOp.SUM, parts)
    if op is ReduceOp.SUM:
        return total
    mean = divide(total._values(), count or communicator.size, own.dtype)
    return with_parts(total, total._indices(), mean, is_coalesced=False)


def _check_shapes(shapes: Sequence[list[int]]) -> None:
    if all(shape == shapes[0] for shape in shapes):
        return
    told = "; ".join(
        f"rank {rank} has shape {tuple(shape[1:])} with {shape[0]} sparse dimensions"
        for rank, shape in enumerate(shapes)
    )
    odd = [rank for rank, shape in enumerate(shapes) if shape != shapes[0]]
    raise UnequalCollectivesError(
        f"A sparse tensor must have the same shape on all ranks, but {told}. Check "
        f"{ranks_in_words(odd)}.",
        odd,
    )
