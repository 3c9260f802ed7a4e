"""Packs that workers exchange: gradients of one dtype, end to end in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from unisono.devices import Trail
from unisono.gradients.packs import Pack, Reduction, gradients_of
from unisono.hooks import GradBucket
from unisono.kernels import reduce_into, tree_reduce, undivided, wide_dtype
from unisono.modules import Leaves
from unisono.options import ReduceOp
from unisono.torch_private import copy_each
from unisono.workers.across import AcrossWorkers
from unisono.workers.replica_hooks import Hook, ReplicaHooks
from unisono.workers.terms import Terms, apart_terms, whole_terms

# Of each term, in bytes.
_ALIGNMENT = 64


class WorkerPack(Pack):
    """Gradients of one dtype, summed or averaged over the replicas of all workers in their order.

    They are end to end, once for each term, in memory from which nothing is copied first. Behind
    them stands for each parameter whether it has a new gradient: one that is used on other workers
    only gets their gradient, and one that nobody uses stays as it is.

    After the exchange the gradients of the first replica are views of the pack, until the next
    backward pass.
    """

    def __init__(
        self,
        members: Sequence[Leaves],
        reduction: Reduction,
        ops: AcrossWorkers,
        shape: Terms | None = None,
    ) -> None:
        super().__init__(members, reduction)
        first = members[0].leaves[0]
        dtype = first.dtype
        if shape is None:
            shape = ops.terms(len(members[0].leaves))
            # Partial sums of half precision are not rounded before the last.
            dtype = wide_dtype(dtype) if shape.are_sums else dtype
        self._ops = ops
        self._op = reduction.op
        self._shape = shape
        self._trail = Trail()
        sizes = [one.primary.numel() for one in members]
        self._num_used_at = sum(sizes)
        length = self._num_used_at + len(members)
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
        self._are_new: list[bool] = []
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
        self._are_new = [one in arrived for one in self.members]
        if all(self._are_new):
            self._is_new.fill_(1)
        elif self.captured_on():
            for flag, is_new in zip(self._is_new.T, self._are_new, strict=True):
                flag.fill_(is_new)
        else:
            self._is_new.copy_(torch.tensor(self._are_new))
        self._note()

    def exchange(self) -> None:
        self._follow()
        self._reduce()
        self._note()

    def _note(self) -> None:
        if not self.captured_on():
            self._trail.note(self._place)

    def _follow(self) -> None:
        # A graph has its own order, and cannot wait for streams outside of it.
        if not self.captured_on():
            self._trail.follow()

    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        """Writes what the replicas of one term make together where it is sent from."""
        if not self._ops.is_tree_sum:
            view.copy_(self._ops.combine_here(undivided(self._op), grads))
        elif grads[0].dtype != view.dtype or not reduce_into(ReduceOp.SUM, [grads], [[view]]):
            here = [grad.to(view.device, view.dtype) for grad in grads]
            view.copy_(tree_reduce(ReduceOp.SUM, here))

    def captured_on(self) -> torch.device | None:
        engine = self._ops.communicator.graph_engine
        return self._place if engine is not None and engine.is_captured else None

    def _reduce(self) -> None:
        count = self._ops.num_replicas if self._op is ReduceOp.MEAN else None
        self._shape.all_reduce(self._ops.communicator, self._op, self._terms, count)

    def give(self) -> Sequence[Leaves]:
        self._follow()
        given: list[Leaves] = []
        # Of a graph, nobody can read it from the GPU. In every replay, all do what they do now.
        is_captured = self.captured_on() is not None
        used = self._ops.any_worker(self._are_new) if is_captured else self._is_used.tolist()
        for one, view, is_used in zip(self.members, self._views[0], used, strict=True):
            if is_used:
                given.append(one)
                if self._can_lend:
                    one.leaves[0].grad = view
                for leaf in one.leaves[self._can_lend :]:
                    if leaf.grad is None:
                        leaf.grad = view.to(leaf.device, leaf.dtype, copy=True)
                    else:
                        leaf.grad.detach().copy_(view)
        return given


class HookedPack(WorkerPack):
    """A pack that a hook reduces to the mean over all replicas.

    Hooks of replicas get the gradients of each replica. Another hook gets the mean of this worker.
    If workers have different numbers of replicas, the mean of a worker is scaled by its number over
    the mean number. So the mean of what the workers bring is the mean of all replicas.
    """

    def __init__(
        self,
        members: Sequence[Leaves],
        reduction: Reduction,
        ops: AcrossWorkers,
        hook: Hook,
        *,
        index: int,
        is_last: bool,
    ) -> None:
        terms = apart_terms if isinstance(hook, ReplicaHooks) else whole_terms
        super().__init__(members, reduction, ops, terms(ops.layout))
        self._hook = hook
        self._index = index
        self._is_last = is_last

    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        view.copy_(self._ops.combine_here(ReduceOp.MEAN, grads))

    @torch.no_grad()
    def _reduce(self) -> None:
        """Lets the hook reduce what is new on any worker.

        As in DDP, the hook sees zeros for all other gradients. These are from earlier passes, and
        stay as they are.
        """
        self._ops.communicator.all_reduce(ReduceOp.SUM, [self._is_used])
        are_used = self._is_used.tolist()
        if not any(are_used):
            return
        old = [number for number, is_used in enumerate(are_used) if not is_used]
        kept = [self._views[0][number].clone() for number in old]
        for views in self._views:
            for number in old:
                views[number].zero_()
        flats = [term[: self._num_used_at] for term in self._terms]
        result, flat = self._mean(flats), flats[0]
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            flat.copy_(result.reshape(-1))
        if self._op is not ReduceOp.MEAN:
            flat.mul_(self._ops.num_replicas)
        for number, gradient in zip(old, kept, strict=True):
            self._views[0][number].copy_(gradient)

    def _mean(self, flats: list[Tensor]) -> Tensor:
        parameters = [one.primary for one in self.members]
        if isinstance(self._hook, ReplicaHooks):
            return self._hook(self._index, flats, parameters, is_last=self._is_last)
        if self._ops.share != 1:
            flats[0].mul_(self._ops.share)
        bucket = GradBucket(self._index, flats[0], parameters, is_last=self._is_last)
        with torch.cuda.device(self._place) if self._place.type == "cuda" else nullcontext():
            return self._hook(bucket)
