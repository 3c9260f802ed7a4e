"""The names of parameters in error messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from unisono.variables.mirrors import Mirrors


def name_of(mirrors: Mirrors, parameter: Tensor) -> str:
    """Returns the name of a primary parameter in its model, such as `encoder.weight` of Net."""
    modules = mirrors.primaries()
    parts = {id(part) for module in modules for part in _held(module, "_modules").values()}
    for module in modules:
        if id(module) not in parts:
            for name in _paths(module, parameter, set()):
                return f"`{name}` of {type(module).__name__}"
    return f"a parameter of shape {tuple(parameter.shape)}"


def _held(module: nn.Module, kind: str) -> dict[str, object]:
    # Not as an attribute, which a replica would be given the clone's of.
    held: dict[str, object] = object.__getattribute__(module, "__dict__")[kind]
    return held


def _paths(module: nn.Module, parameter: Tensor, seen: set[int]) -> Iterator[str]:
    seen.add(id(module))
    for name, own in _held(module, "_parameters").items():
        if own is parameter:
            yield name
    for name, part in _held(module, "_modules").items():
        if isinstance(part, nn.Module) and id(part) not in seen:
            for path in _paths(part, parameter, seen):
                yield f"{name}.{path}"
