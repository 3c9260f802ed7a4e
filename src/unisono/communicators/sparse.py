"""Sparse gradients between ranks: everybody gets the rows of everybody."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator, as_bytes
from unisono.communicators.headers import HEADER_BYTES, Header, check_gathered
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
    num_dims = own.sparse_dim()
    header = Header.of_tensor(f"all_reduce_sparse({op.value}, sparse_dim={num_dims})", 0, own)
    # Travels in front of the indices, which saves a collective.
    prefix = header.as_tensor().to(own.device)
    indices = communicator.all_gather(torch.cat([prefix, as_bytes(own._indices().contiguous())]))
    check_gathered(header, indices)
    values = communicator.all_gather(own._values())
    parts = [
        with_parts(
            own, one[HEADER_BYTES:].view(torch.int64).view(num_dims, -1), value, is_coalesced=False
        )
        for one, value in zip(indices, values, strict=True)
    ]
    total = concatenate(ReduceOp.SUM, parts)
    if op is ReduceOp.SUM:
        return total
    mean = divide(total._values(), count or communicator.size, own.dtype)
    return with_parts(total, total._indices(), mean, is_coalesced=False)
