"""Gradients are reduced while the backward pass still runs.

Parameters are put into packs in the reverse of the order in which they were made, which is about
the order in which their gradients come. The replica that brings the last gradient of a pack reduces
it, while the others go on. When a replica's backward pass ends it waits for the others, so after
`backward()` every gradient is the reduced one; what was not used is reduced last.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.contexts import ReplicaContext, current_replica
from unisono.costs import Line, best_bytes_per_pack
from unisono.devices import Device, Trail, lend
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import group_by_bytes
from unisono.reductions import CrossDeviceOps
from unisono.tracing import span
from unisono.values import DistributedValues, PerReplica
from unisono.variables.accumulation import (
    SealedHooks,
    Weighting,
    before_accumulation,
    call_hooks,
)
from unisono.variables.leaves import Leaves, Mark
from unisono.variables.mirrors import Mirrors
from unisono.variables.own_gradients import OwnGradients


class Pass:
    """One backward pass of all replicas: what has arrived, and what is missing of each pack."""

    def __init__(self, pack_sizes: Sequence[int], num_replicas: int) -> None:
        self._lock = threading.Lock()
        self.missing = [size * num_replicas for size in pack_sizes]
        self.arrived: set[Leaves] = set()
        # The streams that gradients came on, and those they were reduced on.
        self.trail = Trail()

    def arrives(self, pack: int, one: Leaves) -> bool:
        """Counts a gradient, and returns whether it was the last of its pack."""
        with self._lock:
            self.arrived.add(one)
            self.missing[pack] -= 1
            return self.missing[pack] == 0


class GradientReducer:
    """Reduces the gradients of the leaves of one strategy.

    Args:
        mirrors: The leaves.
        devices: The devices of the replicas.
        cross_device_ops: What reduces between them.
        reduce_op: How gradients become one.
        options: Hints for all reductions.
        cost: What the reduction of a pack is predicted to cost; None if that is not known.
    """

    def __init__(
        self,
        mirrors: Mirrors,
        devices: tuple[Device, ...],
        cross_device_ops: CrossDeviceOps,
        reduce_op: ReduceOp,
        options: CommunicationOptions,
        cost: Line | None = None,
    ) -> None:
        self._mirrors = mirrors
        self._devices = devices
        self._is_on_gpus = any(device.type != "cpu" for device in devices)
        self._ops = cross_device_ops
        self._op = reduce_op
        self._options = options
        self._cost = cost
        self._generation = -1
        self._packs: list[list[Leaves]] = []
        # How many gradients each pack waits for on each replica.
        self._sizes: list[int] = []
        # The parameters whose hooks are to be called when their gradient is there.
        self._hooked: list[Leaves] = []
        # What takes the reducer's own hooks away again.
        self._removals: list[Callable[[], None]] = []
        self._weighting = Weighting(reduce_op)
        # By the identity of a leaf, a reduced gradient that waits to be added to.
        self._aside: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._passes: dict[int, Pass] = {}
        self._lock = threading.Lock()
        reducer = weakref.ref(self)

        def reduce_rest(owners: Iterable[Leaves]) -> None:
            if (found := reducer()) is not None:
                found.reduce_rest(owners)

        mirrors.reduce_rest = reduce_rest

    def begin(self, weights: Sequence[float]) -> None:
        """Before a run: looks at the leaves that there are now, and what each replica counts."""
        self._passes.clear()
        self._track()
        self._weighting.begin(weights, self._mirrors.all_leaves)
        self._hooked = [
            one
            for pack in self._packs
            for one in pack
            if (hooks := one.primary._post_accumulate_grad_hooks)
            and not isinstance(hooks, SealedHooks)
        ]

    def _track(self) -> None:
        if self._generation == self._mirrors.generation:
            return
        self._generation = self._mirrors.generation
        for remove in self._removals:
            remove()
        self._packs = self._group(self._mirrors.all_leaves[::-1])
        self._sizes = [sum(one.primary.requires_grad for one in pack) for pack in self._packs]
        self._removals = [
            remove
            for pack, members in enumerate(self._packs)
            for one in members
            if one.primary.requires_grad
            for replica_id in range(len(self._devices))
            for remove in self._hook_leaf(pack, one, replica_id)
        ]

    def _group(self, leaves: Sequence[Leaves]) -> list[list[Leaves]]:
        """Parts the parameters into packs."""
        sizes = [one.primary.nbytes for one in leaves]
        groups = group_by_bytes(sizes, self._bytes_per_pack(sizes))
        return [[leaves[i] for i in group] for group in groups if group]

    def _bytes_per_pack(self, sizes: Sequence[int]) -> int:
        """Returns the size of packs: what the user says, or what is best for these gradients."""
        return self._options.bytes_per_pack or best_bytes_per_pack(self._cost, sum(sizes))

    def _hook_leaf(self, pack: int, one: Leaves, replica_id: int) -> list[Callable[[], None]]:
        """Hooks a leaf, and returns what takes the hooks away again."""
        # Autograd's hooks are invisible to the garbage collector, so they hold weak references.
        reducer, owner = weakref.ref(self), weakref.ref(one)

        def after(_: Tensor) -> None:
            if (found := reducer()) is not None and (leaves := owner()) is not None:
                found._arrived(pack, leaves)

        def before(_: Any) -> None:
            if (found := reducer()) is not None and (leaves := owner()) is not None:
                found._set_aside(leaves, replica_id)

        leaf = one.leaves[replica_id]
        removals = [SealedHooks.on(leaf, after).clear]
        if self._op is not ReduceOp.MEAN:
            # A mean of what is reduced already stays what it is; a sum would be summed again.
            removals.append(before_accumulation(leaf, before))
        return removals

    def _arrived(self, pack: int, one: Leaves) -> None:
        """A leaf has its gradient. Runs on the thread of its replica."""
        context = current_replica()
        if context is None:
            return
        if context.notes.get("no_sync"):
            self._weighting.note(one.leaves[context.local_id], context.weight)
            return
        current = context.notes.get("pass")
        if current is None:
            current = context.notes["pass"] = self._pass(context)
            torch.autograd.Variable._execution_engine.queue_callback(
                functools.partial(self._finish, context)
            )
        if self._is_on_gpus:
            current.trail.note(one.leaves[context.local_id].device)
        if current.arrives(pack, one):
            current.trail.follow()
            self._pack_is_full(current, pack)
            for leaf in one.leaves:
                current.trail.note(leaf.device)

    def after_backward(self, context: ReplicaContext) -> None:
        """After every `backward()` of a replica: one that brought no gradient is a pass too."""
        if not context.notes.pop("has_finished", False) and not context.notes.get("no_sync"):
            self._finish(context)
            context.notes.pop("has_finished")

    def _set_aside(self, one: Leaves, replica_id: int) -> None:
        """Before a gradient is added to a leaf: keeps what is reduced already apart from it."""
        leaf, mark = one.leaves[replica_id], one.reduced[replica_id]
        if leaf.grad is not None and mark is not None and mark.grad() is leaf.grad:
            self._aside[leaf] = self._kept(leaf.grad)
            leaf.grad = None

    def _set_aside_all(self, owners: Iterable[Leaves]) -> None:
        """Before a reduction: does the same where a replica has no new gradient."""
        if self._op is not ReduceOp.MEAN:
            for one in owners:
                for replica_id in range(len(one.leaves)):
                    self._set_aside(one, replica_id)

    def _kept(self, grad: Tensor) -> Tensor:
        """Returns a gradient in memory that the next pass does not write to."""
        return grad

    def close(self) -> None:
        """Ends what the reducer has started: nothing, where there is one worker."""

    def _pass(self, context: ReplicaContext) -> Pass:
        number = context.notes.get("backwards", 0)
        with self._lock:
            if number not in self._passes:
                self._passes[number] = Pass(self._sizes, len(self._devices))
            return self._passes[number]

    def _finish(self, context: ReplicaContext) -> None:
        """A replica's backward pass has ended: wait for the others, and reduce what is left."""
        current = self._pass(context)

        def work(_: Any) -> list[None]:
            current.trail.follow()
            arrived = self._complete(current)
            # The primary itself is meant, not the replica's leaf.
            with torch._C.DisableTorchFunctionSubclass():
                for one in arrived:
                    one.show_gradient()
            if self._hooked:
                arrived = set(arrived)
                call_hooks(context, [one for one in self._hooked if one in arrived])
            return [None] * len(self._devices)

        number = context.notes.get("backwards", 0)
        context.notes.update({"pass": None, "backwards": number + 1, "has_finished": True})
        context.meeting.meet(context.local_id, f"backward() number {number}", None, work)
        if current.trail.follow():
            own = (one.leaves[context.local_id].grad for one in current.arrived)
            lend(grad for grad in own if grad is not None)

    def reduce_rest(self, owners: Iterable[Leaves]) -> None:
        """Before an update: reduces the gradients that replicas have written themselves.

        Other gradients have been reduced by a backward pass, and what replicas did to these since
        is the same on all of them, as clipping is.
        """
        own = [one for one in owners if one.has_own_gradients()]
        if own:
            with span("reduce", "gradients written by hand", (one.primary for one in own)):
                OwnGradients(self._op, self._mirrors, self._weighting).reduce(own, self._reduce_all)

    def _reduce_all(self, owners: Iterable[Leaves]) -> None:
        present = [(one, gradients_of(one.leaves)) for one in owners]
        if self._ops.wants_all_gradients:
            self._reduce_values(present, self._ops.reduce_gradients)
            return
        for group in _by_layout(present):
            self._reduce_group(group)

    def _pack_is_full(self, current: Pass, pack: int) -> None:
        """The last gradient of a pack has come."""
        if self._ops.wants_all_gradients:
            return
        with span("reduce", "pack", (one.primary for one in self._packs[pack]), pack=pack):
            self._reduce(current, [self._packs[pack]])

    def _complete(self, current: Pass) -> Iterable[Leaves]:
        """All backward passes have ended: reduces the rest, and returns what has a gradient."""
        left = self._packs
        if not self._ops.wants_all_gradients:
            left = [pack for pack, n in zip(self._packs, current.missing, strict=True) if n > 0]
        with span("reduce", "packs left", (one.primary for pack in left for one in pack)):
            self._reduce(current, left)
        return current.arrived

    def _reduce(self, current: Pass, packs: Sequence[Sequence[Leaves]]) -> None:
        owners = [one for pack in packs for one in pack if one in current.arrived]
        self._set_aside_all(owners)
        self._reduce_all(owners)
        if self._op is not ReduceOp.MEAN:
            for one in owners:
                self._bring_back(one)

    def _bring_back(self, one: Leaves) -> None:
        for replica_id, leaf in enumerate(one.leaves):
            before = self._aside.pop(leaf, None)
            if before is not None:
                leaf.grad = before if leaf.grad is None else leaf.grad.add_(before)
                one.reduced[replica_id] = Mark.of(leaf.grad)

    def _reduce_group(self, present: Sequence[tuple[Leaves, list[Tensor]]]) -> None:
        if self._ops.reduce_in_place(self._op, [grads for _, grads in present], self._devices):
            return
        self._reduce_values(present, self._ops.batch_reduce)

    def _reduce_values(
        self, present: Sequence[tuple[Leaves, list[Tensor]]], reduce: Callable[..., Any]
    ) -> None:
        values = [PerReplica.placed(tuple(grads), self._devices) for _, grads in present]
        results = reduce(self._op, [(value, value) for value in values], self._options)
        for (one, _), result in zip(present, results, strict=True):
            parts = result.values if isinstance(result, DistributedValues) else (result,)
            for leaf, part in zip(one.leaves, parts, strict=True):
                leaf.grad = part


def _by_layout(
    present: Sequence[tuple[Leaves, list[Tensor]]],
) -> list[list[tuple[Leaves, list[Tensor]]]]:
    """Parts dense gradients, which can be reduced in place, from sparse ones."""
    groups: dict[bool, list[tuple[Leaves, list[Tensor]]]] = {}
    for one, grads in present:
        is_dense = all(grad.layout is torch.strided for grad in grads)
        groups.setdefault(is_dense, []).append((one, grads))
    return list(groups.values())


def gradients_of(leaves: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns the gradient of each replica, with zeros where only others have one."""
    grads = [grad for leaf in leaves if (grad := leaf.grad) is not None]
    if not grads or len(grads) == len(leaves):
        return grads
    for leaf in leaves:
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(grads[0], device=leaf.device)
    return gradients_of(leaves)
