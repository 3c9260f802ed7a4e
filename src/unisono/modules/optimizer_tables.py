"""What an optimizer holds: the groups of its parameters, and its state.

One that wraps another may have neither: its class then gives those of the other, by a property.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from unisono.modules.front import plain_class

Groups = list[dict[str, Any]]


def groups_of(optimizer: Any) -> Groups:
    """Returns the groups of the program, also on a replica; of a wrapper those that it shows."""
    groups: Groups | None = vars(optimizer).get("param_groups")
    # It has none while it is being made.
    return getattr(optimizer, "param_groups", []) if groups is None else groups


def state_of(optimizer: Any) -> dict[Any, Any]:
    """Returns the state; of a wrapper that which it shows."""
    state: dict[Any, Any] | None = vars(optimizer).get("state")
    return getattr(optimizer, "state", {}) if state is None else state


def set_table(optimizer: Any, name: str, value: Any) -> None:
    """Sets `param_groups` or `state`; of a wrapper as its class does."""
    shown = getattr(plain_class(type(optimizer)), name, None)
    if isinstance(shown, property):
        shown.__set__(optimizer, value)
    else:
        vars(optimizer)[name] = value


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
