"""Packs: parameters whose gradients are reduced together, on this worker or with other workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.devices import Device, Trail
from unisono.gradients.replica_hooks import ReplicaHooks
from unisono.hooks import GradBucket
from unisono.hooks.hook import CommHook
from unisono.kernels import reduce_into, tree_reduce, undivided, wide_dtype
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import group_by_bytes
from unisono.reductions import AcrossWorkers, CrossDeviceOps
from unisono.reductions.workers import Terms
from unisono.torch_private import copy_each
from unisono.values import DistributedValues, PerReplica
from unisono.variables import Leaves
from unisono.variables.leaves import gradient_of

# Of each term, in bytes.
_ALIGNMENT = 64
# A parameter, and the gradient that each replica has of it.
Present = tuple[Leaves, list[Tensor]]


class Pack(ABC):
    """The gradients of some parameters on all replicas of this worker, which are reduced together.

    It is filled, exchanged with the other workers if there are any, and given to the replicas. One
    of the replicas, or the thread that sends, does each of these for all of them.
    """

    def __init__(self, members: Sequence[Leaves]) -> None:
        self.members = members
        self.everything = frozenset(members)

    @abstractmethod
    def fill(
        self, arrived: Collection[Leaves], combined: Mapping[Leaves, Tensor] | None = None
    ) -> None:
        """Takes in this worker's gradients, some of which may have been `combined` before."""

    @abstractmethod
    def exchange(self) -> None:
        """Reduces the pack with those of the other workers."""

    @abstractmethod
    def give(self) -> Sequence[Leaves]:
        """Gives the replicas the reduced gradients, and returns the parameters that have one."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """How gradients become one within this worker, or wherever its operations reach."""

    ops: CrossDeviceOps
    op: ReduceOp
    options: CommunicationOptions
    devices: tuple[Device, ...]

    def reduce(self, owners: Sequence[Leaves]) -> None:
        """Reduces the gradients of some parameters, in place where that can be done."""
        # Dense gradients can be reduced in place.
        present: list[Present] = []
        dense: list[Present] = []
        others: list[Present] = []
        for one in owners:
            grads = list(map(gradient_of, one.leaves))
            is_dense = True
            for grad in grads:
                if grad is None:
                    grads = gradients_of(one.leaves)
                    break
            for grad in grads:
                is_dense = is_dense and grad.layout is torch.strided
            present.append((one, grads))
            (dense if is_dense else others).append(present[-1])
        if self.ops.wants_all_gradients:
            self._reduce_values(present, self.ops.reduce_gradients)
            return
        batch = [grads for _, grads in dense]
        if batch and not self.ops.reduce_in_place(self.op, batch, self.devices):
            self._reduce_values(dense, self.ops.batch_reduce)
        if others:
            self._reduce_values(others, self.ops.batch_reduce)

    def reduce_one(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns what the gradients of one parameter become, one per replica."""
        value = PerReplica.placed(tuple(grads), self.devices)
        return _parts(self.ops.batch_reduce(self.op, [(value, value)], self.options)[0])

    def _reduce_values(self, present: Sequence[Present], reduce: Callable[..., Any]) -> None:
        values = [PerReplica.placed(tuple(grads), self.devices) for _, grads in present]
        results = reduce(self.op, [(value, value) for value in values], self.options)
        for (one, _), result in zip(present, results, strict=True):
            for leaf, part in zip(one.leaves, _parts(result), strict=True):
                leaf.grad = part


class LocalPack(Pack):
    """A pack that stays on this worker: gradients are reduced where they are."""

    def __init__(self, members: Sequence[Leaves], reduction: Reduction) -> None:
        super().__init__(members)
        self._reduction = reduction
        self._new: list[Leaves] = []

    def fill(
        self, arrived: Collection[Leaves], combined: Mapping[Leaves, Tensor] | None = None
    ) -> None:
        self._new = [one for one in self.members if one in arrived]
        if self._new:
            self._reduction.reduce(self._new)

    def exchange(self) -> None:
        """See `Pack.exchange`: there is no other worker."""

    def give(self) -> Sequence[Leaves]:
        return self._new


class SparsePack(Pack):
    """One parameter with sparse gradients, of which a worker may have none."""

    def __init__(self, one: Leaves, reduction: Reduction) -> None:
        super().__init__([one])
        self._reduction = reduction
        self._grads: list[Tensor] = []
        self._parts: tuple[Tensor, ...] = ()

    def fill(
        self, arrived: Collection[Leaves], combined: Mapping[Leaves, Tensor] | None = None
    ) -> None:
        (one,) = self.members
        is_new = one in arrived
        self._grads = gradients_of(one.leaves) if is_new else [_no_rows(x) for x in one.leaves]

    def exchange(self) -> None:
        self._parts = self._reduction.reduce_one(self._grads)
        self._grads = []

    def give(self) -> Sequence[Leaves]:
        parts, self._parts = self._parts, ()
        if parts[0]._nnz() == 0:
            return []
        for leaf, part in zip(self.members[0].leaves, parts, strict=True):
            leaf.grad = part
        return self.members


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
        ops: AcrossWorkers,
        op: ReduceOp,
        shape: Terms | None = None,
    ) -> None:
        super().__init__(members)
        first = members[0].leaves[0]
        dtype = first.dtype
        if shape is None:
            shape = ops.terms(len(members[0].leaves))
            # Partial sums of half precision are not rounded before the last.
            dtype = wide_dtype(dtype) if shape.are_sums else dtype
        self._ops = ops
        self._op = op
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

    def exchange(self) -> None:
        self._trail.follow()
        self._reduce()
        self._trail.note(self._place)

    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        """Writes what the replicas of one term make together where it is sent from."""
        if not self._ops.is_tree_sum:
            view.copy_(self._ops.combine_here(undivided(self._op), grads))
        elif grads[0].dtype != view.dtype or not reduce_into(ReduceOp.SUM, [grads], [[view]]):
            here = [grad.to(view.device, view.dtype) for grad in grads]
            view.copy_(tree_reduce(ReduceOp.SUM, here))

    def _reduce(self) -> None:
        """Reduces the terms of all workers into the first of each."""
        count = self._ops.num_replicas if self._op is ReduceOp.MEAN else None
        self._shape.all_reduce(self._ops.communicator, self._op, self._terms, count)

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


class HookedPack(WorkerPack):
    """A pack that a hook reduces to the mean over all replicas.

    Hooks of replicas get the gradients of each replica. Another hook gets the mean of this worker.
    If workers have different numbers of replicas, the mean of a worker is scaled by its number over
    the mean number. So the mean of what the workers bring is the mean of all replicas.
    """

    def __init__(
        self,
        members: Sequence[Leaves],
        ops: AcrossWorkers,
        op: ReduceOp,
        hook: CommHook | ReplicaHooks,
        *,
        index: int,
        is_last: bool,
    ) -> None:
        shape = ops.layout.apart if isinstance(hook, ReplicaHooks) else ops.layout.whole
        super().__init__(members, ops, op, shape)
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


def grouped(owners: Sequence[Leaves], limit: int) -> list[list[Leaves]]:
    """Groups neighboring parameters, up to `limit` bytes per group."""
    sizes = [one.primary.nbytes for one in owners]
    return [[owners[i] for i in group] for group in group_by_bytes(sizes, limit) if group]


def gradients_of(leaves: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns the gradient of each replica, with zeros where only others have one."""
    grads = [grad for leaf in leaves if (grad := leaf.grad) is not None]
    if not grads or len(grads) == len(leaves):
        return grads
    for leaf in leaves:
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(grads[0], device=leaf.device)
    return gradients_of(leaves)


def _parts(result: Any) -> tuple[Tensor, ...]:
    return result.values if isinstance(result, DistributedValues) else (result,)


def _no_rows(leaf: nn.Parameter) -> Tensor:
    """Returns a sparse gradient that is zero."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64),
        torch.empty(0, *leaf.shape[1:], dtype=leaf.dtype),
        leaf.shape,
        device=leaf.device,
        check_invariants=False,
    )


def refuse_sparse(recorder: Any, leaves: Sequence[nn.Parameter], packs: Sequence[Pack]) -> None:
    """Refuses to capture what only this pass knows, and the replay of an exchange would not."""
    layouts = {leaf.grad.layout for leaf in leaves if leaf.grad is not None}
    if layouts - {torch.strided} or any(isinstance(pack, SparsePack) for pack in packs):
        recorder.refuse("workers or GPUs exchange sparse gradients, whose size changes")
