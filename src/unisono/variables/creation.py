"""What is made in a strategy's scope belongs to the strategy."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules import module as registration
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.contexts import current_replica, is_inside_run
from unisono.errors import ContextError
from unisono.variables.for_all import average_once
from unisono.variables.mirrors import MIRROR, Mirrors, raw
from unisono.variables.once import make_once, owner_of
from unisono.variables.redirect import mirror_module


class _Scopes(threading.local):
    """The mirrors of the scopes that this thread is in, and the modules made there."""

    def __init__(self) -> None:
        self.open: list[tuple[Mirrors, dict[nn.Module, None]]] = []


_scopes = _Scopes()
_all_mirrors: weakref.WeakSet[Mirrors] = weakref.WeakSet()


@contextmanager
def creating(mirrors: Mirrors) -> Iterator[None]:
    """Until the block ends, what this thread makes belongs to `mirrors`.

    Modules become primaries at the end of the block: only then have they been initialised.
    """
    _install_hooks()
    _all_mirrors.add(mirrors)
    made: dict[nn.Module, None] = {}
    _scopes.open.append((mirrors, made))
    try:
        yield
    finally:
        _scopes.open.pop()
    for module in made:
        mirror_module(module, mirrors)
    mirrors.share_new()


def bring_in(target: Any, mirrors: Mirrors) -> None:
    """Makes what was made elsewhere belong to `mirrors`."""
    _install_hooks()
    _all_mirrors.add(mirrors)
    if isinstance(target, nn.Module):
        for module in list(target.modules()):
            mirror_module(module, mirrors)
        mirrors.share_new()
    else:
        make_once(target, mirrors)


@functools.cache
def _install_hooks() -> None:
    registration.register_module_parameter_registration_hook(_on_registered)
    registration.register_module_buffer_registration_hook(_on_registered)
    registration.register_module_module_registration_hook(_on_registered)
    register_optimizer_step_pre_hook(_check_optimizer)
    for cls in (Optimizer, lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau, GradScaler):
        _wrap_init(cls)
    _wrap_copies()
    average_once()


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses an optimizer that several replicas would step, or whose parameters they share."""
    context = current_replica()
    if context is not None and context.num_replicas_in_sync > 1:
        raise ContextError(
            f"{type(optimizer).__name__}.step() was called on a replica, but its parameters belong "
            f"to no model of {context.strategy!r}: all replicas would write to them at once. Make "
            "model and optimizer in `strategy.scope()`, or bring them in with `strategy.mirror()`."
        )
    owner = owner_of(optimizer)
    if owner is not None and is_inside_run():
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter.grad is not None and owner.leaves_of(parameter) is None:
                raise ContextError(
                    f"{type(optimizer).__name__} is given a parameter of shape "
                    f"{tuple(parameter.shape)} that belongs to no model of the strategy, so all "
                    "replicas have written to its one gradient at once. A model that is copied or "
                    "loaded is brought in with `strategy.mirror()`, a tensor is made a `Variable`."
                )


def _on_registered(module: nn.Module, name: str, thing: Tensor | nn.Module | None) -> None:
    """A module gets a parameter, buffer or submodule."""
    mirror = raw(module).get(MIRROR)
    if mirror is not None:
        mirror.owner.is_stale = True
        if isinstance(thing, nn.Module):
            for submodule in thing.modules():
                mirror_module(submodule, mirror.owner)
    elif _scopes.open:
        _, made = _scopes.open[-1]
        made.setdefault(module)
        if isinstance(thing, nn.Module):
            made.update(dict.fromkeys(thing.modules()))


def _wrap_init(cls: type) -> None:
    """Lets objects of `cls` be found when they are made: torch has no hook for these."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        mirrors = _mirrors_for(self)
        if mirrors is not None:
            make_once(self, mirrors)

    cls.__init__ = wrapped  # type: ignore[misc]


def _wrap_copies() -> None:
    """Lets modules be found that are made as copies, or loaded: torch registers nothing then."""
    set_state = nn.Module.__setstate__

    @functools.wraps(set_state)
    def wrapped(self: nn.Module, state: Any) -> None:
        set_state(self, state)  # type: ignore[no-untyped-call]
        if _scopes.open:
            _scopes.open[-1][1].setdefault(self)

    nn.Module.__setstate__ = wrapped  # type: ignore[method-assign]


def _mirrors_for(made: Any) -> Mirrors | None:
    """Returns whose object it is: that of the scope, or of what it works on."""
    if _scopes.open:
        return _scopes.open[-1][0]
    if isinstance(made, Optimizer):
        return next((m for m in _all_mirrors if _works_on(made, m)), None)
    optimizer = getattr(made, "optimizer", None)
    return None if optimizer is None else owner_of(optimizer)


def _works_on(optimizer: Optimizer, mirrors: Mirrors) -> bool:
    return any(
        mirrors.owns(parameter) for group in optimizer.param_groups for parameter in group["params"]
    )
