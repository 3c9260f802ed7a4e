"""The collectives of torch.distributed, done by a communicator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed

from unisono.communicators import Communicator, all_reduce_sparse
from unisono.options import ReduceOp

# What we call the operations of torch.distributed.
_OWN: dict[Any, ReduceOp] = {
    distributed.ReduceOp.SUM: ReduceOp.SUM,
    distributed.ReduceOp.AVG: ReduceOp.MEAN,
    distributed.ReduceOp.MIN: ReduceOp.MIN,
    distributed.ReduceOp.MAX: ReduceOp.MAX,
    distributed.ReduceOp.PRODUCT: ReduceOp.PROD,
}
# Communicators divide fractions alone; these are divided here.
_DIVIDED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def reducible_op(op: Any, tensors: Sequence[Tensor], *, or_sparse: bool) -> ReduceOp | None:
    """Returns our name for `op`, or None where communicators do not reduce such tensors so."""
    own, first = _OWN.get(getattr(op, "op", op)), tensors[0]
    if first.layout is torch.sparse_coo:
        is_sum = own is ReduceOp.SUM or (own is ReduceOp.MEAN and _is_fraction(first))
        return own if or_sparse and is_sum else None
    can_divide = _is_fraction(first) or first.dtype in _DIVIDED
    can_combine = can_divide if own is ReduceOp.MEAN else first.dtype is not torch.bool
    return own if can_combine and are_dense(tensors) else None


def _is_fraction(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def are_dense(tensors: Sequence[Tensor]) -> bool:
    """Whether communicators move such tensors."""
    return all(tensor.layout is torch.strided for tensor in tensors)


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in arguments, some of which are lists of them, or lists of lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_in(argument)


def all_reduce(communicator: Communicator, op: ReduceOp, tensors: Sequence[Tensor]) -> None:
    """Overwrites each tensor with the combination of all tensors of all ranks."""
    if tensors[0].layout is torch.sparse_coo:
        # Not through `detach`, which has its own indices.
        with torch.no_grad():
            tensors[0].copy_(all_reduce_sparse(communicator, op, tensors[0]).coalesce())
        return
    terms = _apart([_plain(communicator, tensor) for tensor in tensors])
    _combine(communicator, op, terms)
    for tensor in tensors:
        _copy_back(terms[0], tensor)


def all_reduce_coalesced(
    communicator: Communicator, op: ReduceOp, tensors: Sequence[Tensor]
) -> None:
    """Overwrites each tensor with the combination of those at its place on all ranks.

    All tensors are read before one is written, so a tensor that is given twice counts once.
    """
    own = _apart([_plain(communicator, tensor) for tensor in tensors])
    for one in own:
        _combine(communicator, op, [one])
    for one, tensor in zip(own, tensors, strict=True):
        _copy_back(one, tensor)


def reduce(communicator: Communicator, op: ReduceOp, tensor: Tensor, root: int) -> None:
    """Overwrites the tensor of `root` alone."""
    own = _plain(communicator, tensor)
    if communicator.rank != root:
        own = own.clone()
    _combine(communicator, op, [own])
    if communicator.rank == root:
        _copy_back(own, tensor)


def broadcast(
    communicator: Communicator, tensors: Sequence[Tensor], root: int, position: int
) -> None:
    """Overwrites each tensor with the one at `position` on `root`."""
    own = _plain(communicator, tensors[position])
    communicator.broadcast(own, root)
    for tensor in tensors:
        _copy_back(own, tensor)


def all_gather(communicator: Communicator, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Fills one output for each rank with the tensor of that rank."""
    for output, part in zip(
        outputs, communicator.all_gather(_plain(communicator, tensor)), strict=True
    ):
        output.detach().copy_(part)


def all_gather_single(
    communicator: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Fills each output with the inputs of all ranks, one after the other."""
    for output, tensor in zip(outputs, inputs, strict=True):
        parts = communicator.all_gather(_plain(communicator, tensor))
        own = _plain(communicator, output)
        torch.cat([part.view(-1) for part in parts], out=own.view(-1))
        _copy_back(own, output)


def reduce_scatter(
    communicator: Communicator, op: ReduceOp, output: Tensor, inputs: Sequence[Tensor]
) -> None:
    """Combines one input for each rank, and fills the output with the one for this rank."""
    lengths = [one.numel() for one in inputs]
    terms = torch.cat([_plain(communicator, one).view(-1) for one in inputs])
    if len(set(lengths)) == 1:
        part = _combined_part(communicator, op, terms)
    else:
        _combine(communicator, op, [terms])
        part = terms.split(lengths)[communicator.rank]
    output.detach().copy_(part.view(output.shape))


def reduce_scatter_single(
    communicator: Communicator, op: ReduceOp, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Combines each input, which has one part per rank, and fills the output with this rank's."""
    for output, tensor in zip(outputs, inputs, strict=True):
        part = _combined_part(communicator, op, _plain(communicator, tensor).view(-1))
        output.detach().copy_(part.view(output.shape))


def _combine(communicator: Communicator, op: ReduceOp, terms: Sequence[Tensor]) -> None:
    """Combines the terms of all ranks into the first one; a mean is per rank, not per term."""
    if op is ReduceOp.MEAN and not _is_fraction(terms[0]):
        communicator.all_reduce(ReduceOp.SUM, terms)
        _divide(terms[0], communicator.size)
    else:
        communicator.all_reduce(op, terms, communicator.size if op is ReduceOp.MEAN else None)


def _combined_part(communicator: Communicator, op: ReduceOp, own: Tensor) -> Tensor:
    if op is ReduceOp.MEAN and not _is_fraction(own):
        return _divide(communicator.reduce_scatter(ReduceOp.SUM, [own]), communicator.size)
    return communicator.reduce_scatter(op, [own])


def _divide(total: Tensor, count: int) -> Tensor:
    """Makes a sum of integers their mean, without the fraction, as NCCL does."""
    return total.div_(count, rounding_mode="trunc")


def _plain(communicator: Communicator, tensor: Tensor) -> Tensor:
    """Returns the tensor in contiguous memory that the communicator takes, if it can its own."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return own if communicator.takes(own.device) else own.cpu()


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Returns contiguous tensors that share no memory: the same ones, or copies of all."""
    if len(tensors) == 1:
        return tensors
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors if one.nbytes)
    if all(end <= begin for (_, end), (begin, _) in pairwise(spans)):
        return tensors
    return [one.clone() for one in tensors]


def _copy_back(own: Tensor, tensor: Tensor) -> None:
    if own.data_ptr() == tensor.data_ptr():
        return
    tensor = tensor.detach()
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            # It was expanded along this dimension, where it has one element in memory.
            tensor, own = tensor.narrow(dim, 0, 1), own.narrow(dim, 0, 1)
    tensor.copy_(own)
