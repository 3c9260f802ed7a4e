"""Packs of gradients that travel between workers, in memory from which nothing is copied first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from unisono.devices import Trail
from unisono.kernels import reduce_into, tree_reduce, wide_dtype
from unisono.options import ReduceOp
from unisono.reductions import AcrossWorkers, replicas_in_a_term
from unisono.variables.gradients import gradients_of
from unisono.variables.leaves import Leaves


class WorkerPack:
    """The gradients of some parameters of one dtype, end to end, once for each term.

    Behind them stands for each parameter whether it has a new gradient: one that is used on other
    workers only gets their gradient, and one that nobody uses stays as it is.

    After the exchange the gradients of the first replica are views of the pack, until the next
    backward pass.
    """

    def __init__(self, members: Sequence[Leaves], ops: AcrossWorkers, op: ReduceOp) -> None:
        self.members = members
        self._ops = ops
        self._op = op
        self._trail = Trail()
        first = members[0].leaves[0]
        num_replicas = len(members[0].leaves)
        self._count = num_replicas * ops.communicator.size
        self._together = replicas_in_a_term(num_replicas)
        # Partial sums of half precision are not rounded before the last.
        dtype = wide_dtype(first.dtype) if self._together > 1 else first.dtype
        self._num_used_at = sum(one.primary.numel() for one in members)
        length = self._num_used_at + len(members)
        place = ops.place(first.device)
        num_terms = num_replicas // self._together
        num_bytes = num_terms * length * dtype.itemsize
        if place.type == "cpu":
            memory = ops.communicator.allocate(num_bytes)
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=place)
        self._terms = memory.view(dtype).view(num_terms, length)
        sizes = [one.primary.numel() for one in members]
        self._views = [
            [
                part.view(one.primary.shape)
                for part, one in zip(term[: self._num_used_at].split(sizes), members, strict=True)
            ]
            for term in self._terms
        ]

    @torch.no_grad()
    def fill(self, arrived: Collection[Leaves]) -> None:
        """Takes in the gradients of this worker's replicas; of some there are new ones."""
        for one, *views in zip(self.members, *self._views, strict=True):
            if all(leaf.grad is None for leaf in one.leaves):
                for view in views:
                    view.zero_()
                continue
            grads = gradients_of(one.leaves)
            for number, view in enumerate(views):
                first = number * self._together
                self._combine(grads[first : first + self._together], view)
        is_new = torch.tensor([one in arrived for one in self.members], dtype=self._terms.dtype)
        self._terms[:, self._num_used_at :] = is_new.to(self._terms.device)
        self._trail.note(self._terms.device)

    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        """Writes the sum of the replicas of one term where it is sent from."""
        if len(grads) == 1:
            if grads[0].data_ptr() != view.data_ptr():
                view.copy_(grads[0])
        elif grads[0].dtype != view.dtype or not reduce_into(ReduceOp.SUM, [grads], [[view]]):
            view.copy_(tree_reduce(ReduceOp.SUM, [grad.to(view.dtype) for grad in grads]))

    def exchange(self) -> None:
        """All-reduces the pack with those of the other workers."""
        count = self._count if self._op is ReduceOp.MEAN else None
        self._trail.follow()
        self._ops.communicator.all_reduce(self._op, list(self._terms), count)
        self._trail.note(self._terms.device)

    @torch.no_grad()
    def give(self) -> list[Leaves]:
        """Gives the replicas the reduced gradients, and returns the parameters that have one."""
        self._trail.follow()
        is_used = (self._terms[0][self._num_used_at :] > 0).tolist()
        given = [one for one, used in zip(self.members, is_used, strict=True) if used]
        for one, view, used in zip(self.members, self._views[0], is_used, strict=True):
            if used:
                _set_gradients(one, view)
        return given


def _set_gradients(one: Leaves, total: Tensor) -> None:
    for number, leaf in enumerate(one.leaves):
        if number == 0 and total.dtype == leaf.dtype and total.device == leaf.device:
            leaf.grad = total
        elif leaf.grad is None:
            leaf.grad = total.to(leaf.device, leaf.dtype, copy=True)
        else:
            leaf.grad.copy_(total)
