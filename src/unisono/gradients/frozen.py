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
from unisono.variables import Leaves
from unisono.variables.leaves import needs_grad


class Frozen:
    """The parameters of one strategy that are in no pack."""

    def __init__(self, reduction: Reduction, aside: Aside) -> None:
        self._reduction = reduction
        self._aside = aside
        self._owners: list[Leaves] = []
        self._primaries: list[nn.Parameter] = []
        # By replica, their leaves.
        self._leaves: list[list[nn.Parameter]] = []
        # Those that a step has trained.
        self._trained: set[Leaves] = set()

    def split(self, owners: Sequence[Leaves]) -> list[Leaves]:
        """Returns those parameters that belong into packs, and keeps the others."""
        self._trained &= set(owners)
        if self._aside.is_needed:
            # What puts gradients aside can hook no parameter that is frozen.
            self._trained.clear()
        is_trained = [one.primary.requires_grad or one in self._trained for one in owners]
        self._owners = [one for one, needs in zip(owners, is_trained, strict=True) if not needs]
        self._primaries = [one.primary for one in self._owners]
        self._leaves = list(map(list, zip(*(one.leaves for one in self._owners), strict=True)))
        return [one for one, needs in zip(owners, is_trained, strict=True) if needs]

    @property
    def owners(self) -> Sequence[Leaves]:
        """The parameters."""
        return self._owners

    @property
    def are_new(self) -> bool:
        """Whether one of them is trained now, so that it belongs into a pack."""
        are_trained = not self._trained.isdisjoint(self._owners)
        return are_trained or True in map(needs_grad, self._primaries)

    def unfrozen(self, replica_id: int) -> dict[int, nn.Parameter]:
        """Before a pass of a replica: returns the leaves that it may reach, by number."""
        if not self._owners or True not in map(needs_grad, self._leaves[replica_id]):
            return {}
        leaves = enumerate(self._leaves[replica_id])
        found = {i: leaf for i, leaf in leaves if leaf.requires_grad}
        for i in found:
            self._aside.put_leaf(self._owners[i], replica_id)
        return found

    def reduce(self, numbers: Iterable[int]) -> list[Leaves]:
        """After a pass of all replicas: reduces those that have a new gradient."""
        found = [self._owners[number] for number in numbers]
        if found:
            self._trained.update(found)
            self._aside.put(found)
            self._reduction.reduce(found)
            self._aside.bring_back(found)
        return found
