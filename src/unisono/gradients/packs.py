"""How the gradients of this worker become one: packs, and gradients that replicas have written.

Packs are parameters whose gradients are reduced together.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.devices import Device
from unisono.errors import UnsupportedError
from unisono.gradients.accumulation import Weighting
from unisono.modules import Leaves, Mirrors
from unisono.modules.leaves import show_gradients
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import Line, best_bytes_per_pack, group_by_bytes
from unisono.reductions import CrossDeviceOps, Workers
from unisono.values import PerReplica, components_of

# A parameter, and the gradient that each replica has of it.
Present = tuple[Leaves, list[Tensor]]

_STRIDED = frozenset([torch.strided])
_layout_of = operator.attrgetter("layout")


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
    return [Pack(group, reduction) for group in grouped(trained, limit)]


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


def refuse_sparse(recorder: Any, leaves: Sequence[nn.Parameter], packs: Sequence[Pack]) -> None:
    """Refuses to capture what only this pass knows, and the replay of an exchange would not."""
    if recorder.is_on_host:
        # Python takes them from one function to the next.
        return
    layouts = {leaf.grad.layout for leaf in leaves if leaf.grad is not None}
    if layouts - {torch.strided} or any(isinstance(pack, SparsePack) for pack in packs):
        recorder.refuse("workers or GPUs exchange sparse gradients, whose size changes")


def reduce_own(
    own: Sequence[Leaves], mirrors: Mirrors, weighting: Weighting, reduction: Reduction
) -> None:
    """Reduces gradients that are not the reduced ones any more, and shows all of them.

    A gradient that is equal on all replicas was made of the reduced one, by clipping for example,
    and stays. Others are reduced as those of a backward pass are: `p.grad` that was assigned, added
    to, or left alone by `no_sync`. So are those where nothing was reduced before.
    """
    changed = []
    for one in own:
        pairs = zip(one.leaves, one.reduced, strict=True)
        if not any(mark is None and leaf.grad is not None for leaf, mark in pairs):
            changed.append(one)
    are_equal = _equal(changed, mirrors.workers)
    kept = {one for one, is_equal in zip(changed, are_equal, strict=True) if is_equal}
    left = [one for one in own if one not in kept]
    for one in left:
        _check(one, reduction.op, weighting, mirrors.name_of(one.primary))
        for leaf, weight in zip(one.leaves, weighting.weights, strict=True):
            if weight != 1.0 and leaf.grad is not None and not weighting.is_applied(leaf):
                (leaf.grad,) = weighting.weigh(weight, [leaf.grad])
    if left:
        reduction.reduce(left)
        for one in left:
            for leaf in one.leaves:
                weighting.forget(leaf)
    show_gradients(own)


def _check(one: Leaves, op: ReduceOp, weighting: Weighting, name: str) -> None:
    if op is not ReduceOp.MEAN and any(
        mark is not None and mark.grad() is leaf.grad
        for leaf, mark in zip(one.leaves, one.reduced, strict=True)
    ):
        raise UnsupportedError(
            f"The replicas changed the gradient of {name} in different ways after `backward()` "
            f"had reduced it with {op}, and it cannot be reduced twice. Change it before the "
            "reduction, in a hook of the parameter or in the loss, or once for all replicas with "
            "`unisono.once(fn)`."
        )
    if any(map(weighting.is_mixed, one.leaves)):
        raise UnsupportedError(
            f"The gradient of {name} was assigned after backward passes in `no_sync()`, which "
            "scale it by the replica's share of an uneven batch. Compute it with "
            "`torch.autograd.grad`, which does not scale it."
        )


def _equal(owners: Sequence[Leaves], workers: Workers) -> list[bool]:
    """Returns for each parameter whether all replicas of all workers have one gradient."""
    grads = [[leaf.grad for leaf in one.leaves] for one in owners]
    are_equal = [
        seems or _are_equal(own) for own, seems in zip(grads, _seem_equal(grads), strict=True)
    ]
    if not workers.are_many or not owners:
        return are_equal
    pairs = zip(grads, are_equal, strict=True)
    sums = [_fingerprint(own[0] if is_equal else None) for own, is_equal in pairs]
    first, *rest = workers.gather(torch.stack(sums))
    return [all(torch.equal(row, other[i]) for other in rest) for i, row in enumerate(first)]


def _seem_equal(grads: Sequence[Sequence[Tensor | None]]) -> list[bool]:
    """Returns which gradients on GPUs are equal for sure, after waiting for the GPUs once."""
    are_fit = [all(map(_can_be_compared, own)) for own in grads]
    fit = [own for own, is_fit in zip(grads, are_fit, strict=True) if is_fit]
    if not fit:
        return are_fit
    first: list[Any] = [own[0] for own in fit]
    largest = torch.zeros(len(fit), device=first[0].device)
    for i in range(1, len(fit[0])):
        others: list[Any] = [own[i].to(own[0].device) for own in fit]  # type: ignore[union-attr]
        norms = torch._foreach_norm(torch._foreach_sub(first, others), torch.inf)
        largest = torch.maximum(largest, torch.stack([norm.float() for norm in norms]))
    found = iter((largest == 0).tolist())
    return [is_fit and next(found) for is_fit in are_fit]


def _can_be_compared(grad: Tensor | None) -> bool:
    return (
        grad is not None
        and grad.is_cuda
        and grad.layout is torch.strided
        and grad.is_floating_point()
        and grad.numel() > 0
    )


def _are_equal(grads: Sequence[Tensor | None]) -> bool:
    first = grads[0]
    for one in grads[1:]:
        if first is None or one is None or {first.layout, one.layout} != {torch.strided}:
            return False
        other = one.to(first.device)
        if not torch.equal(first, other) and not (
            torch.equal(first.isnan(), other.isnan())
            and torch.equal(first.nan_to_num(), other.nan_to_num())
        ):
            return False
    return first is not None


def _fingerprint(grad: Tensor | None) -> Tensor:
    """Returns two numbers that are the same on workers whose gradients are; NaN is not."""
    if grad is None or grad.layout is not torch.strided:
        return torch.full((2,), torch.nan, dtype=torch.float64)
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    wide = real.detach().double().cpu().nan_to_num()
    return torch.stack([wide.sum(), wide.square().sum()])
