"""Reduced gradients that a sum must not add up again are kept apart from what is added to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from unisono.gradients.accumulation import before_accumulation
from unisono.options import ReduceOp
from unisono.variables import Leaves, Mark


class Aside:
    """Keeps reduced gradients apart while new ones come, and adds them to these afterwards.

    A mean of what is reduced already stays what it is, so for a mean it does nothing.
    """

    def __init__(self, op: ReduceOp, *, is_copied: bool) -> None:
        self._is_needed = op is not ReduceOp.MEAN
        self._is_copied = is_copied
        # By the identity of a leaf, a reduced gradient that waits to be added to.
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def has_any(self) -> bool:
        """Whether a gradient waits to be added to."""
        return bool(self._kept)

    def hook(self, one: Leaves) -> list[Callable[[], None]]:
        """Puts aside what the leaves of a parameter have before something is added to it."""
        if not self._is_needed:
            return []
        return [self._hook_leaf(one, replica_id) for replica_id in range(len(one.leaves))]

    def _hook_leaf(self, one: Leaves, replica_id: int) -> Callable[[], None]:
        # Autograd's hooks are invisible to the garbage collector, so they hold weak references.
        aside, owner = weakref.ref(self), weakref.ref(one)

        def before(_: Any) -> None:
            if (found := aside()) is not None and (leaves := owner()) is not None:
                found._put_leaf(leaves, replica_id)

        return before_accumulation(one.leaves[replica_id], before)

    def put(self, owners: Iterable[Leaves]) -> None:
        """Before a reduction: does the same where a replica has no new gradient."""
        if self._is_needed:
            for one in owners:
                for replica_id in range(len(one.leaves)):
                    self._put_leaf(one, replica_id)

    def _put_leaf(self, one: Leaves, replica_id: int) -> None:
        leaf, mark = one.leaves[replica_id], one.reduced[replica_id]
        if leaf.grad is not None and mark is not None and mark.grad() is leaf.grad:
            self._kept[leaf] = leaf.grad.clone() if self._is_copied else leaf.grad
            leaf.grad = None

    def bring_back(self, owners: Iterable[Leaves]) -> None:
        """After a reduction: adds what was put aside."""
        if not self._is_needed:
            return
        for one in owners:
            for replica_id, leaf in enumerate(one.leaves):
                before = self._kept.pop(leaf, None)
                if before is not None:
                    leaf.grad = before if leaf.grad is None else leaf.grad.add_(before)
                    one.reduced[replica_id] = Mark.of(leaf.grad)
