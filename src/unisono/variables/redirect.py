"""Modules that answer a replica with its own clone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from unisono.contexts import current_replica
from unisono.errors import ContextError
from unisono.variables.metrics import is_own
from unisono.variables.mirrors import MIRROR, Mirror, Mirrors, plain_class, raw


class Redirect:
    """Comes before the user's class in a primary module.

    In a replica's thread every attribute is that of the replica's clone: parameters, submodules,
    methods and `forward`, whoever asks and whatever was kept of the module before. Clones
    have the user's own class, so nothing is slower inside them. Elsewhere the module is itself.
    """

    def __getattribute__(self, name: str) -> Any:
        clone = _clone(self)
        if clone is not None:
            return getattr(clone, name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        clone = _clone(self)
        if clone is not None:
            setattr(clone, name, value)
            return
        _change(self, name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        clone = _clone(self)
        if clone is not None:
            delattr(clone, name)
            return
        _make_stale(self)
        super().__delattr__(name)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as in torch
        """Clears the gradients of the module; on a replica its own, elsewhere those of all."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        mirror: Mirror | None = raw(self).get(MIRROR)  # type: ignore[arg-type]
        if mirror is not None:
            for parameter in self.parameters():
                mirror.owner.clear_gradient(parameter, set_to_none=set_to_none)

    def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _make_stale(self)
        return super()._apply(fn, *args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain modules, which belong to no strategy."""
        get_state: Any = getattr(self, "__getstate__", lambda: self.__dict__)
        state = {name: value for name, value in get_state().items() if name != MIRROR}
        return _plain_module, (plain_class(type(self)),), state  # type: ignore[arg-type]


def _plain_module(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def mirror_module(module: nn.Module, mirrors: Mirrors) -> None:
    """Makes one module, without its submodules, a primary of `mirrors`."""
    mirror = raw(module).get(MIRROR)
    if mirror is not None and mirror.owner is not mirrors:
        raise ContextError(
            f"This {type(module).__name__} belongs to another strategy. Make a copy of it with "
            "`copy.deepcopy`, which belongs to none."
        )
    mirrors.is_in_use = True
    if mirrors.is_single:
        mirrors.move(module)
    elif mirror is None:
        mirrors.adopt(module)
        cls: Any = type(module)
        object.__setattr__(module, "__class__", redirecting(cls))


@functools.cache
def redirecting(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of primaries of `cls`; it goes by the same name."""
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_unisono_plain_class": cls,
    }
    return type(cls.__name__, (Redirect, cls), namespace)


def _clone(module: Any) -> nn.Module | None:
    context = current_replica()
    if context is None:
        return None
    mirror: Mirror | None = raw(module).get(MIRROR)
    if mirror is None:
        return None
    if mirror.owner is not context.strategy.extended.mirrors:
        raise ContextError(
            f"This {type(module).__name__} belongs to another strategy than {context.strategy!r}, "
            "whose replicas would share its parameters. Make it in the scope of the one that runs."
        )
    return mirror.replicas[context.local_id]


def _change(module: Any, name: str) -> None:
    """Lets clones be given an attribute that is set anew, also if it is what they were given."""
    mirror: Mirror | None = raw(module).get(MIRROR)
    if mirror is not None and not is_own(raw(module), name):
        mirror.owner.is_stale = True
        mirror.given.pop(name, None)


def _make_stale(module: Any) -> None:
    mirror: Mirror | None = raw(module).get(MIRROR)
    if mirror is not None:
        mirror.owner.is_stale = True
