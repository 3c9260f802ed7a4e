"""Reductions inside one memory: a whole batch in one call, or the terms of a collective."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.kernels.checks import check_replicas
from unisono.kernels.native import native_core
from unisono.kernels.tree import divide, tree_reduce, undivided, wide_dtype
from unisono.options import ReduceOp

Item = Sequence[Tensor]


@functools.cache
def _on_gpu() -> Callable[[ReduceOp, Sequence[Item], Sequence[Item]], bool]:
    """Returns what reduces on a GPU. Programs on CPUs do not load it."""
    from unisono.kernels.gpu import reduce_on_gpu

    return reduce_on_gpu


def reduce_batch(
    op: ReduceOp, batch: Sequence[Item], copies: Sequence[int]
) -> list[tuple[Tensor, ...]]:
    """Combines the tensors of each item, and returns `copies` new tensors with each result.

    The tensors of an item are dense, one per replica, and in one memory. If the tensors of an item
    do not fit together, it raises before torch computes anything.
    """
    results = reduce_fused(op, batch, copies)
    left = [i for i, result in enumerate(results) if result is None]
    for i in left:
        check_replicas(op, batch[i], "The value" if len(batch) == 1 else f"Value {i} of the batch")
    for i in left:
        results[i] = _reduce_item(op, batch[i], copies[i])
    return results  # type: ignore[return-value]


def reduce_fused(
    op: ReduceOp, batch: Sequence[Item], copies: Sequence[int]
) -> list[tuple[Tensor, ...] | None]:
    """Reduces the items that the fused kernels support, and returns None for the others.

    The kernels support contiguous tensors that fit together, so these items need no other check. On
    a GPU, they reduce the whole batch or nothing.
    """
    if not batch or not _is_on_gpu(batch[0]):
        return _reduce_on_host(op, batch, copies)
    if not all(_is_on_gpu(item) and item[0].layout is torch.strided for item in batch):
        return [None] * len(batch)
    outputs = [
        tuple(torch.empty_like(item[0], requires_grad=False) for _ in range(count))
        for item, count in zip(batch, copies, strict=True)
    ]
    return [*outputs] if _on_gpu()(op, batch, outputs) else [None] * len(batch)


def _is_on_gpu(item: Item) -> bool:
    return isinstance(item[0], Tensor) and item[0].is_cuda


def _reduce_on_host(
    op: ReduceOp, batch: Sequence[Item], copies: Sequence[int]
) -> list[tuple[Tensor, ...] | None]:
    kernel = native_core().kernel
    if kernel is None:
        return [None] * len(batch)
    name, is_mean = undivided(op).value, op is ReduceOp.MEAN
    # The kernel would refuse sparse tensors too, but asking torch for their storage is slow.
    kept = [i for i, item in enumerate(batch) if not _is_sparse(item)]
    if not kept:
        return [None] * len(batch)
    if len(kept) == len(batch):
        return kernel.reduce(name, batch, copies, is_mean, torch.get_num_threads())
    given = [batch[i] for i in kept], [copies[i] for i in kept]
    reduced = kernel.reduce(name, *given, is_mean, torch.get_num_threads())
    by_index = dict(zip(kept, reduced, strict=True))
    return [by_index.get(i) for i in range(len(batch))]


def _is_sparse(item: Item) -> bool:
    first = item[0]
    return isinstance(first, Tensor) and first.layout is not torch.strided


def reduce_into(op: ReduceOp, batch: Sequence[Item], outputs: Sequence[Item]) -> bool:
    """Writes results into existing tensors, which may be the inputs.

    Returns False, with nothing written, if the kernels do not support every item. They support
    tensors with the same unusual memory order, such as channels_last.
    """
    if not batch:
        return True
    into = _on_gpu() if _is_on_gpu(batch[0]) else _reduce_into_on_host
    if into(op, batch, outputs):
        return True
    reordered = _reordered(batch, outputs)
    return reordered is not None and into(op, *reordered)


def _reduce_into_on_host(op: ReduceOp, batch: Sequence[Item], outputs: Sequence[Item]) -> bool:
    kernel = native_core().kernel
    if kernel is None or any(map(_is_sparse, batch)):
        return False
    is_mean = op is ReduceOp.MEAN
    try:
        kernel.reduce_into(undivided(op).value, batch, outputs, is_mean, torch.get_num_threads())
    except ValueError:
        return False
    return True


def _reordered(
    batch: Sequence[Item], outputs: Sequence[Item]
) -> tuple[list[Item], list[Item]] | None:
    """Returns contiguous views of the tensors, or None if that changes nothing."""
    if any(_is_sparse(item) for item in batch):
        return None
    orders = [_memory_order((*item, *own)) for item, own in zip(batch, outputs, strict=True)]
    if not any(orders):
        return None
    inputs = list(map(_permuted, batch, orders))
    return inputs, inputs if outputs is batch else list(map(_permuted, outputs, orders))


def _permuted(item: Item, order: list[int] | None) -> Item:
    return item if order is None else tuple(tensor.permute(order) for tensor in item)


def _reduce_item(op: ReduceOp, tensors: Item, num_copies: int) -> tuple[Tensor, ...]:
    order = _memory_order(tensors)
    if order is not None:
        # Dense tensors with the same memory order, such as channels_last, are contiguous if
        # permuted.
        results = reduce_fused(op, [_permuted(tensors, order)], [num_copies])[0]
        if results is not None:
            back = sorted(range(len(order)), key=order.__getitem__)
            return tuple(result.permute(back) for result in results)
    total = tree_reduce(op, tensors)
    return (total, *(total.clone() for _ in range(num_copies - 1)))[:num_copies]


def in_memory_order(tensors: Item) -> Item:
    """Returns views that are contiguous, of tensors that share an order such as channels_last."""
    return _permuted(tensors, _memory_order(tensors))


def _memory_order(tensors: Item) -> list[int] | None:
    """Returns the dimensions from the slowest to the fastest if that makes all contiguous."""
    first = tensors[0]
    if first.is_contiguous():
        return None
    strides = first.stride()
    order = sorted(range(first.dim()), key=lambda dim: -strides[dim])
    is_dense = all(tensor.permute(order).is_contiguous() for tensor in tensors)
    return order if is_dense else None


def combine_into(
    op: ReduceOp, terms: Sequence[Tensor], outputs: Sequence[Tensor], count: int | None
) -> None:
    """Writes the combination of `terms` into every output, which may be one of the terms.

    A mean is the sum divided by `count`, or by the number of terms.
    """
    if op is not ReduceOp.MEAN or count in (None, len(terms)):
        if reduce_into(op, [terms], [outputs]):
            return
        result = tree_reduce(op, terms)
    else:
        dtype = terms[0].dtype
        wide = wide_dtype(dtype)
        if wide == dtype and reduce_into(ReduceOp.SUM, [terms], [outputs[:1]]):
            total = outputs[0]
        else:
            # The sum of half precision is divided before it is rounded, not after.
            total = tree_reduce(ReduceOp.SUM, [term.to(wide) for term in terms])
        result = divide(total, count or 1, dtype)
    for output in outputs:
        output.copy_(result)
