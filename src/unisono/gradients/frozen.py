"""Parameters that were frozen when a run began, and that its step trains all the same.

A step may call `requires_grad_()`, as programs do that train two models in turn. Such a parameter
is in no pack. In the first pass that trains it, it is reduced when the pass ends. From the next run
on it is in a pack, also where it is frozen when a run begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from unisono.gradients.accumulation import Aside
from unisono.gradients.packs import Reduction
from unisono.modules import Leaves
from unisono.modules.leaves import needs_grad


class Frozen:
    """The parameters of one strategy that are in no pack.

    Attributes:
        owners: The parameters.
        leaves: By replica, their leaves.
        are_new: Whether a step has trained one of them, so that it belongs into a pack.
    """

    def __init__(self, reduction: Reduction, aside: Aside, num_replicas: int) -> None:
        self._reduction = reduction
        self._aside = aside
        self.owners: list[Leaves] = []
        self.leaves: list[list[nn.Parameter]] = [[] for _ in range(num_replicas)]
        self.are_new = False
        # All that steps have trained so.
        self._trained: set[Leaves] = set()

    def split(self, owners: Sequence[Leaves]) -> list[Leaves]:
        """Returns those parameters that belong into packs, and keeps the others."""
        self._trained &= set(owners)
        packed: list[Leaves] = []
        self.owners = []
        for one in owners:
            is_trained = one.primary.requires_grad or one in self._trained
            (packed if is_trained else self.owners).append(one)
        self.are_new = False
        self.leaves = [[one.leaves[i] for one in self.owners] for i in range(len(self.leaves))]
        return packed

    def reached_by(self, replica_id: int) -> Sequence[nn.Parameter]:
        """Before a pass of a replica: returns all leaves if it may reach one of them, or none."""
        leaves = self.leaves[replica_id]
        return leaves if True in map(needs_grad, leaves) else ()

    def reduce(self, numbers: Iterable[int]) -> list[Leaves]:
        """After a pass of all replicas: reduces those that have a new gradient."""
        found = [self.owners[number] for number in numbers]
        if found:
            self.are_new = True
            self._trained.update(found)
            self._aside.put(found)
            self._reduction.reduce(found)
            self._aside.bring_back(found)
        return found
