"""A whole batch of reductions inside one memory, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.kernels.checks import check_replicas
from unisono.kernels.native import native_core
from unisono.kernels.tree import tree_reduce
from unisono.options import ReduceOp

Item = Sequence[Tensor]


def reduce_batch(
    op: ReduceOp, batch: Sequence[Item], copies: Sequence[int]
) -> list[tuple[Tensor, ...]]:
    """Combines the tensors of each item, and returns `copies` new tensors with each result.

    The tensors of an item are dense, one a replica, and in one memory. Raises before anything is
    computed through torch if the tensors of an item do not go together.
    """
    results = reduce_native(op, batch, copies)
    left = [i for i, result in enumerate(results) if result is None]
    for i in left:
        check_replicas(op, batch[i], "The value" if len(batch) == 1 else f"Value {i} of the batch")
    for i in left:
        results[i] = _reduce_item(op, batch[i], copies[i])
    return results  # type: ignore[return-value]


def reduce_native(
    op: ReduceOp, batch: Sequence[Item], copies: Sequence[int]
) -> list[tuple[Tensor, ...] | None]:
    """Reduces what the native core takes as it is, and returns None for every other item.

    It takes contiguous host tensors that go together, so what it takes needs no other check.
    """
    kernel = native_core().kernel
    if kernel is None:
        return [None] * len(batch)
    is_mean = op is ReduceOp.MEAN
    name = "sum" if is_mean else op.value
    # It would refuse sparse tensors too, but torch takes long to say that they have no storage.
    kept = [i for i, item in enumerate(batch) if not _is_sparse(item)]
    if len(kept) == len(batch):
        return kernel.reduce(name, batch, copies, is_mean, torch.get_num_threads())
    given = [batch[i] for i in kept], [copies[i] for i in kept]
    reduced = kernel.reduce(name, *given, is_mean, torch.get_num_threads())
    by_index = dict(zip(kept, reduced, strict=True))
    return [by_index.get(i) for i in range(len(batch))]


def _is_sparse(item: Item) -> bool:
    first = item[0]
    return isinstance(first, Tensor) and first.layout is not torch.strided


def reduce_into(op: ReduceOp, batch: Sequence[Item], outputs: Sequence[Sequence[Tensor]]) -> bool:
    """Writes results into tensors that are there, which may be the inputs themselves.

    Returns False, with nothing written, if the native core does not take every item. Tensors that
    share an unusual order, such as channels_last, it takes.
    """
    kernel = native_core().kernel
    if kernel is None or any(_is_sparse(item) for item in batch):
        return False
    is_mean = op is ReduceOp.MEAN
    name = "sum" if is_mean else op.value
    for i, item in enumerate(batch):
        order = _memory_order((*item, *outputs[i]))
        if order is not None:
            batch, outputs = list(batch), list(outputs)
            batch[i] = [tensor.permute(order) for tensor in item]
            outputs[i] = [tensor.permute(order) for tensor in outputs[i]]
    try:
        kernel.reduce_into(name, batch, outputs, is_mean, torch.get_num_threads())
    except ValueError:
        return False
    return True


def _reduce_item(op: ReduceOp, tensors: Item, num_copies: int) -> tuple[Tensor, ...]:
    order = _memory_order(tensors)
    if order is not None:
        # Dense tensors that share an unusual order, such as channels_last, are plain if permuted.
        permuted = [tuple(tensor.permute(order) for tensor in tensors)]
        results = reduce_native(op, permuted, [num_copies])[0]
        if results is not None:
            back = sorted(range(len(order)), key=order.__getitem__)
            return tuple(result.permute(back) for result in results)
    total = tree_reduce(op, tensors)
    return (total, *(total.clone() for _ in range(num_copies - 1)))[:num_copies]


def _memory_order(tensors: Item) -> list[int] | None:
    """Returns the dimensions from the slowest to the fastest if that makes all contiguous."""
    first = tensors[0]
    if first.is_contiguous():
        return None
    strides = first.stride()
    order = sorted(range(first.dim()), key=lambda dim: -strides[dim])
    is_dense = all(tensor.permute(order).is_contiguous() for tensor in tensors)
    return order if is_dense else None
