"""What a strategy knows about one module, and the names of parameters in error messages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from unisono.variables.mirrors import Mirrors

# Equal to no attribute.
_ANEW = (0, None)


@dataclass(eq=False)
class Mirror:
    """What a strategy knows about a primary module."""

    owner: Mirrors
    primary: weakref.ref[nn.Module]
    replicas: list[nn.Module] = field(default_factory=list)
    # By name, the attributes of the primary that the clones have, and what replica 0 sees there.
    given: dict[str, tuple[int, Any]] = field(default_factory=dict)

    def forget(self, name: str) -> None:
        """Lets the clones get an attribute again, even if its value has not changed."""
        self.given[name] = _ANEW
        self.owner.is_stale = True


# By the identity of a primary. The strategy keeps the mirror, and not the module: what a module
# keeps is saved and copied with it.
_mirrors: dict[int, weakref.ref[Mirror]] = {}


def remember(module: nn.Module, mirror: Mirror) -> None:
    """Registers the mirror of a module, as long as both live."""
    identity = id(module)
    _mirrors[identity] = weakref.ref(mirror, lambda _: _mirrors.pop(identity, None))


def mirror_of(module: object) -> Mirror | None:
    """Returns the mirror of a module, if it is a primary."""
    found = _mirrors.get(id(module))
    mirror = None if found is None else found()
    return mirror if mirror is not None and mirror.primary() is module else None


def bare_clone(cls: type[nn.Module]) -> nn.Module:
    """Makes a clone that has nothing yet."""
    clone: nn.Module = object.__new__(cls)
    clone.__dict__.update(_parameters={}, _buffers={}, _modules={})
    return clone


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
