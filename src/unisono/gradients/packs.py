"""Packs: parameters whose gradients are reduced together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.devices import Device
from unisono.modules import Leaves
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import Line, best_bytes_per_pack, group_by_bytes
from unisono.reductions import CrossDeviceOps
from unisono.values import PerReplica, components_of

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

    def captured_on(self) -> torch.device | None:
        """Returns the GPU on whose graph the exchange becomes a part, if it does."""
        return None

    @abstractmethod
    def give(self) -> Sequence[Leaves]:
        """Gives the replicas the reduced gradients, and returns the parameters that have one."""


class Exchange(ABC):
    """What reduces gradients on their way to other workers, or through a communication hook.

    Attributes:
        reduction: How gradients become one that no pack has.
        is_hooked: Whether code of the program reduces packs.
    """

    reduction: Reduction
    is_hooked: bool

    @abstractmethod
    def packs(self, trained: Sequence[Leaves]) -> tuple[list[Pack], list[Pack]]:
        """Returns packs of parameters, and those for single parameters with sparse gradients."""

    @abstractmethod
    def combine(self, values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Lets a reduction that wants all gradients at once combine those of this worker."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ends what is under way, because of Ctrl-C."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads."""


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
            grads, is_dense = gradients_of(one.leaves), True
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
        return components_of(self.ops.batch_reduce(self.op, [(value, value)], self.options)[0])

    def _reduce_values(self, present: Sequence[Present], reduce: Callable[..., Any]) -> None:
        values = [PerReplica.placed(tuple(grads), self.devices) for _, grads in present]
        results = reduce(self.op, [(value, value) for value in values], self.options)
        for (one, _), result in zip(present, results, strict=True):
            for leaf, part in zip(one.leaves, components_of(result), strict=True):
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


def grouped(owners: Sequence[Leaves], limit: int) -> list[list[Leaves]]:
    """Groups neighboring parameters, up to `limit` bytes per group."""
    sizes = [one.primary.nbytes for one in owners]
    return [[owners[i] for i in group] for group in group_by_bytes(sizes, limit) if group]


def local_packs(
    trained: Sequence[Leaves], reduction: Reduction, cost: Line | None = None
) -> list[Pack]:
    """Returns the packs of a worker that is alone, where a reduction has that `cost`."""
    limit = 0
    if not reduction.ops.wants_all_gradients:
        limit = reduction.options.bytes_per_pack or best_limit(trained, cost)
    return [LocalPack(group, reduction) for group in grouped(trained, limit)]


def best_limit(trained: Sequence[Leaves], cost: Line | None) -> int:
    """Returns the best size of packs of some parameters, in bytes."""
    return best_bytes_per_pack(cost, sum(one.primary.nbytes for one in trained))


def gradients_of(leaves: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns the gradient of each replica, with zeros where only others have one."""
    grads = [grad for leaf in leaves if (grad := leaf.grad) is not None]
    if not grads or len(grads) == len(leaves):
        return grads
    for leaf in leaves:
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(grads[0], device=leaf.device)
    return gradients_of(leaves)


def _no_rows(leaf: nn.Parameter) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64),
        torch.empty(0, *leaf.shape[1:], dtype=leaf.dtype),
        leaf.shape,
        device=leaf.device,
        check_invariants=False,
    )


def refuse_sparse(recorder: Any, leaves: Sequence[nn.Parameter], packs: Sequence[Pack]) -> None:
    """Refuses to capture what only this pass knows, and the replay of an exchange would not."""
    if recorder.is_on_host:
        # Python takes them from one function to the next.
        return
    layouts = {leaf.grad.layout for leaf in leaves if leaf.grad is not None}
    if layouts - {torch.strided} or any(isinstance(pack, SparsePack) for pack in packs):
        recorder.refuse("workers or GPUs exchange sparse gradients, whose size changes")
