"""Which strategy an optimizer, scheduler or scaler belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from unisono.modules.attributes import are_same
from unisono.modules.leaves import Leaves, VariableLeaves
from unisono.modules.optimizer_tables import parameters_of

if TYPE_CHECKING:
    from unisono.modules.mirrors import Mirrors


class Found(NamedTuple):
    """What replicas have of the parameters of an optimizer, in one generation of leaves."""

    generation: int = -1
    parameters: Sequence[Tensor] = ()
    leaves: Sequence[Leaves] = ()
    # Those of variables, which no watch sees.
    of_variables: Sequence[Leaves] = ()
    num_bytes: int = 0


class _Owner:
    """Which strategy an object belongs to."""

    __slots__ = ("found", "mirrors", "target")

    def __init__(self, target: Any, mirrors: Mirrors) -> None:
        identity = id(target)
        self.target = weakref.ref(target, lambda _: _owners.pop(identity, None))
        self.mirrors = weakref.ref(mirrors)
        self.found = Found()


# By identity. Not an attribute of the object, which would be saved with it.
_owners: dict[int, _Owner] = {}


def give_to(target: Any, mirrors: Mirrors) -> None:
    """Makes an object belong to these mirrors."""
    _owners[id(target)] = _Owner(target, mirrors)


def owner_of(target: Any) -> Mirrors | None:
    """Returns the mirrors that an object belongs to."""
    owner = _owners.get(id(target))
    return None if owner is None or owner.target() is not target else owner.mirrors()


def mirrors_of(target: Any) -> Mirrors:
    """Returns the mirrors of an object that belongs to some."""
    mirrors = owner_of(target)
    assert mirrors is not None
    return mirrors


def found_of(optimizer: Any) -> Found:
    """Returns what replicas have of the parameters; nothing, where there is one replica."""
    mirrors = owner_of(optimizer)
    if mirrors is None:
        return Found()
    owner = _owners[id(optimizer)]
    parameters = parameters_of(optimizer)
    generation = mirrors.generation
    if owner.found.generation != generation or not are_same(owner.found.parameters, parameters):
        leaves = [one for p in parameters if (one := mirrors.leaves_of(p)) is not None]
        of_variables = [one for one in leaves if isinstance(one, VariableLeaves)]
        num_bytes = sum(p.nbytes for p in parameters)
        owner.found = Found(generation, parameters, leaves, of_variables, num_bytes)
    return owner.found
