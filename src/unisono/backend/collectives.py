"""The collectives of torch.distributed, done by a communicator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from unisono.communicators import Communicator, all_reduce_sparse, own_op
from unisono.errors import UnsupportedError
from unisono.options import ReduceOp

# Communicators divide fractions alone; these are divided here.
_DIVIDED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def reducible_op(
    op: distributed.ReduceOp, tensors: Sequence[Tensor], *, or_sparse: bool
) -> ReduceOp | None:
    """Returns our name for `op`, or None where communicators do not reduce the tensors so."""
    own = own_op(op)
    if own is None or not all(_can_reduce(own, one, or_sparse=or_sparse) for one in tensors):
        return None
    return own


def _can_reduce(op: ReduceOp, tensor: Tensor, *, or_sparse: bool) -> bool:
    if tensor.layout is torch.sparse_coo:
        is_sum = op is ReduceOp.SUM or (op is ReduceOp.MEAN and _is_fraction(tensor))
        return or_sparse and is_sum and tensor.is_cpu
    can_divide = _is_fraction(tensor) or tensor.dtype in _DIVIDED
    can_combine = can_divide if op is ReduceOp.MEAN else tensor.dtype is not torch.bool
    return can_combine and are_dense([tensor])


def _is_fraction(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def are_dense(tensors: Sequence[Tensor]) -> bool:
    """Whether communicators move such tensors."""
    return all(tensor.is_cpu and tensor.layout is torch.strided for tensor in tensors)


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in arguments, some of which are lists of them, or lists of lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_in(argument)


def all_reduce(communicator: Communicator, op: ReduceOp, tensors: Sequence[Tensor]) -> None:
    """Overwrites each tensor, dense or sparse, with the combination of those of all ranks."""
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            # Not through `detach`, which has indices of its own.
            with torch.no_grad():
                tensor.copy_(all_reduce_sparse(communicator, op, tensor).coalesce())
            continue
        own = _plain(tensor)
        _combine(communicator, op, own)
        _copy_back(own, tensor)


def reduce(communicator: Communicator, op: ReduceOp, tensor: Tensor, root: int) -> None:
    """Overwrites the tensor of `root` alone."""
    own = _plain(tensor)
    if communicator.rank != root:
        own = own.clone()
    _combine(communicator, op, own)
    if communicator.rank == root:
        _copy_back(own, tensor)


def broadcast(communicator: Communicator, tensor: Tensor, root: int) -> None:
    """Overwrites the tensor with that of `root`."""
    own = _plain(tensor)
    communicator.broadcast(own, root)
    _copy_back(own, tensor)


def all_gather(communicator: Communicator, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Fills one output for each rank with the tensor of that rank."""
    if len(outputs) != communicator.size:
        raise UnsupportedError(
            f"{communicator.size} ranks need as many tensors to gather into, got {len(outputs)}."
        )
    for output, part in zip(outputs, communicator.all_gather(_plain(tensor)), strict=True):
        _fill(output, part)


def all_gather_single(
    communicator: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Fills each output with the inputs of all ranks, one after the other."""
    for output, tensor in zip(outputs, inputs, strict=True):
        _check_room(output, tensor.numel() * communicator.size, tensor.dtype)
        parts = communicator.all_gather(_plain(tensor))
        own = _plain(output)
        torch.cat([part.view(-1) for part in parts], out=own.view(-1))
        _copy_back(own, output)


def reduce_scatter(
    communicator: Communicator, op: ReduceOp, output: Tensor, inputs: Sequence[Tensor]
) -> None:
    """Combines one input for each rank, and fills the output with that of this rank."""
    if len(inputs) != communicator.size:
        raise UnsupportedError(
            f"{communicator.size} ranks need as many tensors to scatter, got {len(inputs)}."
        )
    lengths = [one.numel() for one in inputs]
    terms = torch.cat([_plain(one).view(-1) for one in inputs])
    _check_room(output, lengths[communicator.rank], terms.dtype)
    if len(set(lengths)) == 1:
        _fill(output, _combined_part(communicator, op, terms))
    else:
        _combine(communicator, op, terms)
        _fill(output, terms.split(lengths)[communicator.rank])


def reduce_scatter_single(
    communicator: Communicator, op: ReduceOp, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Combines inputs of as many parts as ranks, and fills each output with that of this rank."""
    for output, tensor in zip(outputs, inputs, strict=True):
        _check_room(tensor, output.numel() * communicator.size, output.dtype)
        _fill(output, _combined_part(communicator, op, _plain(tensor).view(-1)))


def _combine(communicator: Communicator, op: ReduceOp, own: Tensor) -> None:
    if op is ReduceOp.MEAN and not _is_fraction(own):
        communicator.all_reduce(ReduceOp.SUM, [own])
        _divide(own, communicator.size)
    else:
        communicator.all_reduce(op, [own])


def _combined_part(communicator: Communicator, op: ReduceOp, own: Tensor) -> Tensor:
    if op is ReduceOp.MEAN and not _is_fraction(own):
        return _divide(communicator.reduce_scatter(ReduceOp.SUM, [own]), communicator.size)
    return communicator.reduce_scatter(op, [own])


def _divide(total: Tensor, count: int) -> Tensor:
    """Makes a sum of integers their mean, without the fraction, as NCCL does."""
    return total.div_(count, rounding_mode="trunc")


def _plain(tensor: Tensor) -> Tensor:
    """Returns the tensor in contiguous memory: its own where it is so, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _copy_back(own: Tensor, tensor: Tensor) -> None:
    if own.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(own)


def _fill(output: Tensor, part: Tensor) -> None:
    _check_room(output, part.numel(), part.dtype)
    output.detach().copy_(part.view(output.shape))


def _check_room(tensor: Tensor, num_elements: int, dtype: torch.dtype) -> None:
    if tensor.numel() != num_elements or tensor.dtype != dtype:
        raise UnsupportedError(
            f"A {tensor.dtype} tensor of shape {tuple(tensor.shape)} was given where "
            f"{num_elements} elements of {dtype} belong. Give one of that size and dtype."
        )
