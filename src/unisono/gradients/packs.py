"""Packs: parameters whose gradients are reduced together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.devices import Device
from unisono.options import CommunicationOptions, ReduceOp
from unisono.reductions import CrossDeviceOps
from unisono.values import PerReplica, components_of
from unisono.variables import Leaves

# A parameter, and the gradient that each replica has of it.
Present = tuple[Leaves, list[Tensor]]

_STRIDED = frozenset([torch.strided])
_layout_of = operator.attrgetter("layout")


@dataclass(frozen=True, eq=False)
class Reduction:
    """How gradients become one within this worker, or wherever its operations reach."""

    ops: CrossDeviceOps
    op: ReduceOp
    options: CommunicationOptions
    devices: tuple[Device, ...]

    def reduce(self, owners: Sequence[Leaves]) -> None:
        """Reduces the gradients of some parameters, in place where that can be done."""
        present: list[Present] = []
        # Dense gradients can be reduced in place.
        dense: list[Present] = []
        others: list[Present] = []
        for one in owners:
            present.append((one, grads := gradients_of(one.leaves)))
            (dense if _STRIDED.issuperset(map(_layout_of, grads)) else others).append(present[-1])
        if self.ops.wants_all_gradients:
            self._reduce_values(present, self.ops.reduce_gradients)
            return
        batch = [grads for _, grads in dense]
        if batch and not self.ops.reduce_in_place(self.op, batch, self.devices):
            self._reduce_values(dense, self.ops.batch_reduce)
        if others:
            self._reduce_values(others, self.ops.batch_reduce)

    def _reduce_values(self, present: Sequence[Present], reduce: Callable[..., Any]) -> None:
        values = [PerReplica.placed(tuple(grads), self.devices) for _, grads in present]
        results = reduce(self.op, [(value, value) for value in values], self.options)
        for (one, _), result in zip(present, results, strict=True):
            for leaf, part in zip(one.leaves, components_of(result), strict=True):
                leaf.grad = part


class Pack:
    """The gradients of some parameters on all replicas of this worker, which are reduced together.

    It is filled, exchanged with the other workers if there are any, and given to the replicas. One
    of the replicas, or the thread that sends, does each of these for all of them. A plain pack
    stays on this worker: gradients are reduced where they are.
    """

    def __init__(self, members: Sequence[Leaves], reduction: Reduction) -> None:
        self.members = members
        self.everything = frozenset(members)
        self._reduction = reduction
        self._new: Sequence[Leaves] = []

    def fill(
        self, arrived: Collection[Leaves], combined: Mapping[Leaves, Tensor] | None = None
    ) -> None:
        """Takes in this worker's gradients, some of which may have been `combined` before."""
        self._new = [one for one in self.members if one in arrived]
        if self._new:
            self._reduction.reduce(self._new)

    def exchange(self) -> None:
        """Reduces the pack with those of the other workers."""

    def captured_on(self) -> torch.device | None:
        """Returns the GPU on whose graph the exchange becomes a part, if it does."""
        return None

    def give(self) -> Sequence[Leaves]:
        """Gives the replicas the reduced gradients, and returns the parameters that have one."""
        return self._new


class SparsePack(Pack):
    """One parameter with sparse gradients, of which a worker may have none."""

    def __init__(self, one: Leaves, reduction: Reduction) -> None:
        super().__init__([one], reduction)
        self._grads: list[Tensor] = []
        self._parts: tuple[Tensor, ...] = ()

    def fill(
        self, arrived: Collection[Leaves], combined: Mapping[Leaves, Tensor] | None = None
    ) -> None:
        (one,) = self.members
        if one in arrived:
            self._grads = gradients_of(one.leaves)
            return
        nowhere = torch.empty(1, 0, dtype=torch.int64)
        self._grads = [
            torch.sparse_coo_tensor(
                nowhere,
                torch.empty(0, *leaf.shape[1:], dtype=leaf.dtype),
                leaf.shape,
                device=leaf.device,
                check_invariants=False,
            )
            for leaf in one.leaves
        ]

    def exchange(self) -> None:
        ops, op = self._reduction.ops, self._reduction.op
        value = PerReplica.placed(tuple(self._grads), self._reduction.devices)
        (result,) = ops.batch_reduce(op, [(value, value)], self._reduction.options)
        self._parts, self._grads = components_of(result), []

    def give(self) -> Sequence[Leaves]:
        parts, self._parts = self._parts, ()
        if parts[0]._nnz() == 0:
            return []
        for leaf, part in zip(self.members[0].leaves, parts, strict=True):
            leaf.grad = part
        return self.members


def gradients_of(leaves: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns the gradient of each replica, with zeros where only others have one."""
    grads = [grad for leaf in leaves if (grad := leaf.grad) is not None]
    if not grads or len(grads) == len(leaves):
        return grads
    for leaf in leaves:
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(grads[0], device=leaf.device)
    return gradients_of(leaves)


def refuse_sparse(recorder: Any, leaves: Sequence[nn.Parameter], packs: Sequence[Pack]) -> None:
    """Refuses to capture what only this pass knows, and the replay of an exchange would not."""
    if recorder.is_on_host:
        # Python takes them from one function to the next.
        return
    layouts = {leaf.grad.layout for leaf in leaves if leaf.grad is not None}
    if layouts - {torch.strided} or any(isinstance(pack, SparsePack) for pack in packs):
        recorder.refuse("workers or GPUs exchange sparse gradients, whose size changes")
