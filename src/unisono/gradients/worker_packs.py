"""Packs of gradients that travel between workers, in memory from which nothing is copied first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from unisono.devices import Trail
from unisono.gradients.packs import Pack, gradients_of
from unisono.gradients.replica_hooks import ReplicaHooks
from unisono.hooks import GradBucket
from unisono.hooks.hook import CommHook
from unisono.kernels import reduce_into, tree_reduce, wide_dtype
from unisono.options import ReduceOp
from unisono.reductions import AcrossWorkers
from unisono.reductions.layouts import Terms
from unisono.torch_private import copy_each
from unisono.variables import Leaves

# Of each term, in bytes.
_ALIGNMENT = 64


class FlatPack(Pack):
    """A pack of gradients of one dtype, end to end, once for each term.

    Behind them stands for each parameter whether it has a new gradient: one that is used on other
    workers only gets their gradient, and one that nobody uses stays as it is.

    After the exchange the gradients of the first replica are views of the pack, until the next
    backward pass.
    """

    def __init__(
        self, members: Sequence[Leaves], ops: AcrossWorkers, dtype: torch.dtype, shape: Terms
    ) -> None:
        super().__init__(members)
        self._ops = ops
        self._shape = shape
        self._trail = Trail()
        self._num_used_at = sum(one.primary.numel() for one in members)
        length = self._num_used_at + len(members)
        first = members[0].leaves[0]
        self._place = ops.place(first.device)
        # Whether the gradients of the first replica can be views of the pack.
        self._can_lend = first.dtype == dtype and first.device == self._place
        num_terms = len(shape.own)
        # Kernels may round differently if memory is aligned differently.
        stride = -(-length * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // dtype.itemsize
        num_bytes = num_terms * stride * dtype.itemsize
        # Shared memory is for workers that all bring the same number of terms.
        if self._place.type == "cpu" and shape.are_plain:
            memory = ops.communicator.allocate(num_bytes)
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._place)
        terms = memory.view(dtype).view(num_terms, stride)[:, :length]
        self._terms = list(terms)
        self._is_new = terms[:, self._num_used_at :]
        self._is_used = self._is_new[0]
        sizes = [one.primary.numel() for one in members]
        self._views = [
            [
                # Not a view for autograd: torch counts the writes to each gradient by itself.
                part.view(one.primary.shape).data
                for part, one in zip(term[: self._num_used_at].split(sizes), members, strict=True)
            ]
            for term in self._terms
        ]

    @torch.no_grad()
    def fill(
        self, arrived: Collection[Leaves], combined: Mapping[Leaves, Tensor] | None = None
    ) -> None:
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for one, *views in zip(self.members, *self._views, strict=True):
            if combined is not None and one in combined:
                views[0].copy_(combined[one])
                continue
            grads = gradients_of(one.leaves)
            for replicas, view in zip(self._shape.own, views, strict=True):
                own = grads[replicas]
                if len(own) > 1:
                    self._combine(own, view)
                elif not own:
                    view.zero_()
                elif own[0].data_ptr() != view.data_ptr():
                    sources.append(own[0])
                    targets.append(view)
        if targets:
            copy_each(targets, sources)
        is_new = [one in arrived for one in self.members]
        if all(is_new):
            self._is_new.fill_(1)
        else:
            self._is_new.copy_(torch.tensor(is_new))
        self._trail.note(self._place)

    @abstractmethod
    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        """Writes what the replicas of one term make together where it is sent from."""

    def exchange(self) -> None:
        self._trail.follow()
        self._reduce()
        self._trail.note(self._place)

    @abstractmethod
    def _reduce(self) -> None:
        """Reduces the terms of all workers into the first of each."""

    def give(self) -> Sequence[Leaves]:
        self._trail.follow()
        given: list[Leaves] = []
        are_used = self._is_used.tolist()
        for one, view, is_used in zip(self.members, self._views[0], are_used, strict=True):
            if is_used:
                self._set_gradients(one.leaves, view)
                given.append(one)
        return given

    def _set_gradients(self, leaves: Sequence[nn.Parameter], total: Tensor) -> None:
        if self._can_lend:
            leaves[0].grad = total
            leaves = leaves[1:]
        for leaf in leaves:
            if leaf.grad is None:
                leaf.grad = total.to(leaf.device, leaf.dtype, copy=True)
            else:
                leaf.grad.detach().copy_(total)


class WorkerPack(FlatPack):
    """A pack that is summed, or averaged, over the replicas of all workers in their order."""

    def __init__(self, members: Sequence[Leaves], ops: AcrossWorkers, op: ReduceOp) -> None:
        shape = ops.terms(len(members[0].leaves))
        # Partial sums of half precision are not rounded before the last.
        dtype = members[0].leaves[0].dtype
        dtype = wide_dtype(dtype) if shape.are_sums else dtype
        super().__init__(members, ops, dtype, shape)
        self._op = op

    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        if not self._ops.is_tree_sum:
            view.copy_(self._ops.combine_here(self._op, grads))
        elif grads[0].dtype != view.dtype or not reduce_into(ReduceOp.SUM, [grads], [[view]]):
            here = [grad.to(view.device, view.dtype) for grad in grads]
            view.copy_(tree_reduce(ReduceOp.SUM, here))

    def _reduce(self) -> None:
        count = self._ops.num_replicas if self._op is ReduceOp.MEAN else None
        self._shape.all_reduce(self._ops.communicator, self._op, self._terms, count)


class _HookedPack(FlatPack):
    """A pack that a hook reduces to the mean over all replicas."""

    def __init__(
        self,
        members: Sequence[Leaves],
        ops: AcrossWorkers,
        op: ReduceOp,
        shape: Terms,
        *,
        index: int,
        is_last: bool,
    ) -> None:
        super().__init__(members, ops, members[0].leaves[0].dtype, shape)
        self._factor = 1 if op is ReduceOp.MEAN else ops.num_replicas
        self._index = index
        self._is_last = is_last

    @torch.no_grad()
    def _reduce(self) -> None:
        """Lets the hook reduce the gradients; which of them are new the hook does not see."""
        flats = [term[: self._num_used_at] for term in self._terms]
        result = self._mean(flats, [one.primary for one in self.members])
        flat = flats[0]
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            flat.copy_(result.reshape(-1))
        if self._factor != 1:
            flat.mul_(self._factor)
        self._ops.communicator.all_reduce(ReduceOp.SUM, [self._is_used])

    @abstractmethod
    def _mean(self, flats: list[Tensor], parameters: list[Tensor]) -> Tensor:
        """Returns the mean over all replicas, given the gradients of each term."""


class HookedPack(_HookedPack):
    """A pack that a hook turns from the mean of this worker into the mean of all.

    If workers have different numbers of replicas, the mean of a worker is scaled by its number over
    the mean number. So the mean of what the workers bring is the mean of all replicas.
    """

    def __init__(
        self,
        members: Sequence[Leaves],
        ops: AcrossWorkers,
        op: ReduceOp,
        hook: CommHook,
        *,
        index: int,
        is_last: bool,
    ) -> None:
        super().__init__(members, ops, op, ops.layout.whole, index=index, is_last=is_last)
        self._hook = hook

    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        view.copy_(self._ops.mean_here(grads))

    def _mean(self, flats: list[Tensor], parameters: list[Tensor]) -> Tensor:
        if self._ops.share != 1:
            flats[0].mul_(self._ops.share)
        bucket = GradBucket(self._index, flats[0], parameters, is_last=self._is_last)
        with torch.cuda.device(self._place) if self._place.type == "cuda" else nullcontext():
            return self._hook(bucket)


class ReplicaPack(_HookedPack):
    """A pack with the gradients of each replica, for hooks of replicas."""

    def __init__(
        self,
        members: Sequence[Leaves],
        ops: AcrossWorkers,
        op: ReduceOp,
        hooks: ReplicaHooks,
        *,
        index: int,
        is_last: bool,
    ) -> None:
        super().__init__(members, ops, op, ops.layout.apart, index=index, is_last=is_last)
        self._hooks = hooks

    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        raise AssertionError(f"a term is one replica, not {len(grads)}")

    def _mean(self, flats: list[Tensor], parameters: list[Tensor]) -> Tensor:
        return self._hooks(self._index, flats, parameters, is_last=self._is_last)
