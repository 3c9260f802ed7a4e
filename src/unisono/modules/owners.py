"""Which strategy an object of the program belongs to, what optimizers hold, and what replicas see.

An optimizer that wraps another may have neither groups nor state: its class then gives those of the
other, by a property. Replicas share the state, and only updates write to it.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from unisono.contexts import current_replica
from unisono.errors import ContextError
from unisono.modules.attributes import are_same
from unisono.modules.leaves import Leaves, VariableLeaves
from unisono.values import version_of

if TYPE_CHECKING:
    from unisono.modules.mirrors import Mirrors

Groups = list[dict[str, Any]]


class Found(NamedTuple):
    """What replicas have of the parameters of an optimizer, in one generation of leaves."""

    generation: int = -1
    parameters: Sequence[Tensor] = ()
    leaves: Sequence[Leaves] = ()
    # Those of variables, which no watch sees.
    of_variables: Sequence[Leaves] = ()
    num_bytes: int = 0


class _Owner:
    """Which strategy an object belongs to. The entry ends with the object, which may have two."""

    __slots__ = ("found", "mirrors", "target")

    def __init__(self, target: Any, mirrors: Mirrors) -> None:
        identity = id(target)
        self.target = weakref.ref(target, lambda _: _owners.pop(identity, None))
        self.mirrors = weakref.ref(mirrors)
        self.found = Found()


# By identity. Not an attribute of the object, which would be saved and copied with it.
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


def groups_of(optimizer: Any) -> Groups:
    """Returns the groups of the program, also on a replica; of a wrapper those that it shows."""
    groups: Groups | None = vars(optimizer).get("param_groups")
    # It has none while it is being made.
    return getattr(optimizer, "param_groups", []) if groups is None else groups


def state_of(optimizer: Any) -> dict[Any, Any]:
    """Returns the state; of a wrapper that which it shows."""
    state: dict[Any, Any] | None = vars(optimizer).get("state")
    return getattr(optimizer, "state", {}) if state is None else state


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Returns the parameters that an optimizer works on."""
    return [p for group in groups_of(optimizer) for p in group["params"]]


def tables_in(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Returns the state of each parameter. An optimizer may keep more than this in its state."""
    return [own for own in state.values() if isinstance(own, dict)]


def tensors_in(state: dict[Any, Any]) -> Iterator[Tensor]:
    """Yields the tensors in the state of an optimizer."""
    for own in (state, *tables_in(state)):
        yield from (value for value in own.values() if isinstance(value, Tensor))


def found_of(optimizer: Any) -> Found:
    """Returns what replicas have of the parameters; nothing, where there is one replica."""
    mirrors = owner_of(optimizer)
    if mirrors is None:
        return Found()
    owner = _owners[id(optimizer)]
    parameters = parameters_of(optimizer)
    if owner.found.generation != mirrors.generation or not are_same(
        owner.found.parameters, parameters
    ):
        leaves = [one for p in parameters if (one := mirrors.leaves_of(p)) is not None]
        of_variables = [one for one in leaves if isinstance(one, VariableLeaves)]
        num_bytes = sum(p.nbytes for p in parameters)
        owner.found = Found(mirrors.generation, parameters, leaves, of_variables, num_bytes)
    return owner.found


class SeenState(defaultdict[Any, Any]):
    """The state of an optimizer, which a replica finds under its own parameters, too."""

    def __init__(self, state: dict[Any, Any], mirrors: Mirrors) -> None:
        super().__init__(dict, state)
        self._mirrors = weakref.ref(mirrors)

    def _key(self, key: Any) -> Any:
        mirrors = self._mirrors()
        if mirrors is None or not isinstance(key, Tensor) or current_replica() is None:
            return key
        return mirrors.of_program(key)

    def __missing__(self, key: Any) -> Any:
        primary = self._key(key)
        return super().__missing__(key) if primary is key else self[primary]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._key(key), default)

    def __reduce__(self) -> Any:
        """Copies and pickles are of the plain class, as torch makes it."""
        return defaultdict, (dict,), None, None, iter(self.items())


_lock = threading.Lock()


def seen_state(optimizer: Any, mirrors: Mirrors) -> SeenState:
    """Returns the state of an optimizer. The watch will see what a replica writes to it."""
    with _lock:
        # Another replica may have been faster. What is written to its object must be seen here.
        state = vars(optimizer)["state"]
        if not isinstance(state, SeenState):
            state = vars(optimizer)["state"] = SeenState(state, mirrors)
        states, context = mirrors.watch.states, current_replica()
        is_shared = context is not None and context.num_local_replicas > 1
        if is_shared and id(optimizer) not in states:
            states[id(optimizer)] = StateNote(optimizer)
    return state


class StateNote:
    """What the state of an optimizer holds. All replicas would write there, so a sum is wrong."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._held, self._versions = self._now()

    def check(self) -> None:
        """Raises if it holds something else now."""
        held, versions = self._now()
        if versions != self._versions or not are_same(held, self._held):
            raise ContextError(
                f"A step wrote to the state of {type(self._optimizer).__name__}, which all "
                "replicas share, so the state is wrong now: load it from a checkpoint. Write once "
                "for all replicas with `unisono.once`, for example "
                '`unisono.once(lambda: optimizer.state[p]["step"].zero_())`.'
            )

    def _now(self) -> tuple[list[Any], list[int]]:
        held: list[Any] = []
        for own in vars(self._optimizer)["state"].values():
            # To read the state of a parameter that has none makes an empty table.
            held += (*own, *own.values()) if isinstance(own, dict) else (own,)
        return held, [version_of(one) for one in held]
