"""Adds objects that are created in a scope to its strategy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules import module as registration
from torch.optim import Optimizer, lr_scheduler, swa_utils

from unisono.contexts import current_replica
from unisono.modules.attributes import raw
from unisono.modules.for_all import once
from unisono.modules.leaves import clear
from unisono.modules.metric_notes import UPDATES, is_clone, is_metric, is_own, note_updates
from unisono.modules.mirrors import Mirrors
from unisono.modules.once_calls import make_once
from unisono.modules.outsiders import check_call, note_maker, refuse_outsiders
from unisono.modules.owners import owner_of, parameters_of
from unisono.modules.torch_calls import watch_calls
from unisono.sharing import LiveSet, computed_once, in_place_of


class _Scopes(threading.local):
    """The mirrors of the scopes that this thread is in, and the modules made there."""

    open: tuple[tuple[Mirrors, dict[int, nn.Module]], ...] = ()


# Those schedulers that do not call `__init__` of `LRScheduler` are there themselves.
_ONCE = (
    *(Optimizer, GradScaler, lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau),
    *(lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler),
)
_scopes = _Scopes()
_all_mirrors: LiveSet[Mirrors] = LiveSet()


@contextmanager
def creating(mirrors: Mirrors) -> Iterator[None]:
    """Until the block ends, objects that this thread creates belong to `mirrors`."""
    _install_hooks()
    _all_mirrors.add(mirrors)
    # By identity: a metric that is being made has no hash yet.
    made: dict[int, nn.Module] = {}
    before, _scopes.open = _scopes.open, (*_scopes.open, (mirrors, made))
    try:
        yield
    finally:
        _scopes.open = before
    for module in made.values():
        mirrors.take_in(module)
    mirrors.share_new()


def bring_in(target: Any, mirrors: Mirrors) -> None:
    """Adds an object that was created elsewhere to `mirrors`."""
    _install_hooks()
    _all_mirrors.add(mirrors)
    if isinstance(target, nn.Module):
        for module in list(target.modules()):
            mirrors.take_in(module)
        mirrors.share_new()
    else:
        make_once(target, mirrors)


@computed_once
def _install_hooks() -> None:
    """Installs hooks that find everything created in a scope or added to a primary."""
    registration.register_module_parameter_registration_hook(_on_registered)
    registration.register_module_buffer_registration_hook(_on_registered)
    registration.register_module_module_registration_hook(_on_registered)
    for cls in _ONCE:
        _wrap_init(cls)
    Optimizer.__new__ = staticmethod(_make_optimizer)  # type: ignore[method-assign,assignment]
    for name in ("__init__", "__setstate__"):
        _wrap_making(name, getattr(nn.Module, name))
    update: Any = swa_utils.AveragedModel.update_parameters

    @in_place_of(swa_utils.AveragedModel, "update_parameters")
    def update_parameters(self: Any, model: nn.Module) -> None:
        once(update, self, model)


@computed_once
def watch_torch() -> None:
    """Before the first strategy of several replicas: notices what is done outside its runs."""
    _install_hooks()
    refuse_outsiders()
    watch_calls()
    _watch_attributes()
    for cls in (nn.Module, Optimizer):
        _wrap_zero_grad(cls)


def _watch_attributes() -> None:
    """Lets replicas be given what is set on a primary: between runs it is a plain module."""
    set_attribute, delete_attribute = nn.Module.__setattr__, nn.Module.__delattr__

    @in_place_of(nn.Module, "__setattr__")
    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        mirrors = owner_of(self)
        if mirrors is not None and not is_own(raw(self), name):
            mirrors.give_again(self, name)
        if name == UPDATES and is_clone(raw(self)):
            note_updates(self, value)
        elif name == UPDATES and is_metric(raw(self)):
            check_call(self, "update")
        set_attribute(self, name, value)

    @in_place_of(nn.Module, "__delattr__")
    def __delattr__(self: nn.Module, name: str) -> None:
        mirrors = owner_of(self)
        if mirrors is not None:
            mirrors.give_again(self, name)
        delete_attribute(self, name)


def _wrap_zero_grad(cls: Any) -> None:
    """Makes clearing gradients outside `run` clear them on each replica."""
    zero_grad = cls.zero_grad

    @in_place_of(cls, "zero_grad")
    def wrapped(self: Any, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as in torch
        zero_grad(self, set_to_none)
        if current_replica() is None:
            of_module = isinstance(self, nn.Module)
            for mirrors in [one for one in _all_mirrors if one.all_leaves]:
                found = map(
                    mirrors.leaves_of, self.parameters() if of_module else parameters_of(self)
                )
                for leaves in filter(None, found):
                    for leaf in leaves.leaves:
                        clear(leaf, set_to_none=set_to_none)


def _on_registered(module: nn.Module, name: str, thing: Tensor | nn.Module | None) -> None:
    """Called when a module gets a parameter, buffer or submodule."""
    mirrors = owner_of(module)
    if mirrors is not None:
        mirrors.is_stale = True
        if isinstance(thing, nn.Module):
            for submodule in thing.modules():
                mirrors.take_in(submodule)
    elif isinstance(thing, nn.Parameter):
        note_maker(thing)
    if mirrors is None and _scopes.open:
        modules = [module, *(thing.modules() if isinstance(thing, nn.Module) else ())]
        _scopes.open[-1][1].update((id(one), one) for one in modules)


def _wrap_making(name: str, make: Any) -> None:
    """Lets modules be found that register nothing, as metrics do, and copies of modules."""

    @in_place_of(nn.Module, name)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if _scopes.open:
            _scopes.open[-1][1].setdefault(id(self), self)
        else:
            note_maker(self)


def _wrap_init(cls: type) -> None:
    """Lets objects of `cls` be found when they are made: torch has no hook for these."""
    init = cls.__init__  # type: ignore[misc]

    @in_place_of(cls, "__init__")
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        note_maker(self)
        init(self, *args, **kwargs)
        if _scopes.open:
            mirrors: Mirrors | None = _scopes.open[-1][0]
        elif isinstance(self, Optimizer):
            parameters = parameters_of(self)
            mirrors = next((one for one in _all_mirrors if any(map(one.owns, parameters))), None)
        else:
            mirrors = owner_of(getattr(self, "optimizer", None))
        if mirrors is not None:
            make_once(self, mirrors)


def _make_optimizer(cls: type[Optimizer], *args: Any, **kwargs: Any) -> Any:
    """Finds optimizers, too, that wrap another and do not call `__init__` of `Optimizer`."""
    create: Any = super(Optimizer, cls).__new__
    made = create(cls) if create is object.__new__ else create(cls, *args, **kwargs)
    if _scopes.open:
        make_once(made, _scopes.open[-1][0])
    return made
