"""What a strategy knows about one module."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

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
    # What the clones were last given of the primary's buffers, and the run after which their own
    # buffers were last read.
    buffers: dict[str, Any] = field(default_factory=dict)
    runs_read: int = 0

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
