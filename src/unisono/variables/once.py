"""Objects that all replicas share and that do their work once: optimizers, schedulers, scalers.

Every replica calls `optimizer.step()`; the replicas meet there, and one update is made for all. To
this end the class of the object is replaced by one that comes before it and goes by its name.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from unisono.contexts import ReplicaContext, current_replica, entered, is_inside_run
from unisono.errors import ContextError
from unisono.options import ReduceOp
from unisono.values import PerReplica, as_tensor
from unisono.variables.for_all import for_all
from unisono.variables.groups import SeenState
from unisono.variables.leaves import Leaves, clear
from unisono.variables.mirrors import Mirrors
from unisono.variables.shares import update_in_shares

# Whose an object is. Not an attribute of it, which would be saved with it.
_owners: weakref.WeakKeyDictionary[Any, Mirrors] = weakref.WeakKeyDictionary()


def do_once(context: ReplicaContext, what: str, work: Callable[[], Any]) -> Any:
    """Lets the replicas meet, does the work once for all of them, and gives all the result."""

    def once(_: Any) -> list[Any]:
        with for_all(context), torch._C.DisableTorchFunction():
            return [work()] * context.num_local_replicas

    return context.meeting.meet(context.local_id, what, None, once)


class Once:
    """Copies and pickles are of the plain class, and belong to no strategy."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = next(cls for cls in type(self).__mro__[1:] if not issubclass(cls, Once))
        get_state: Any = getattr(self, "__getstate__", lambda: self.__dict__)
        return _plain, (plain,), get_state()


def _plain(cls: Any) -> Any:
    return cls.__new__(cls)


class OnceOptimizer(Once):
    """Comes before the class of an optimizer."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Makes one update for all replicas, with the gradients that they have reduced."""
        context = current_replica()
        what = f"{type(self).__name__}.step()"
        if context is None:
            if not is_inside_run():
                hidden = [leaves for leaves in _leaves(self) if leaves.is_hidden()]
                _mirrors_of(self).reduce_rest(hidden)
            return self._update(closure, **kwargs)
        if closure is None:
            return do_once(context, what, lambda: self._update_taken(context, **kwargs))
        return _step_with_closures(self, context, what, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as in torch
        """Clears the gradients of this replica; outside a replica, those of all."""
        context = current_replica()
        owners = _leaves(self)
        if context is None:
            super().zero_grad(set_to_none)  # type: ignore[misc]
            cleared = [leaf for leaves in owners for leaf in leaves.leaves]
        else:
            cleared = [leaves.leaves[context.local_id] for leaves in owners]
            if context.local_id == 0:
                cleared += [leaves.primary for leaves in owners]
        # Without asking the replica's mode for every gradient.
        with torch._C.DisableTorchFunction():
            for tensor in cleared:
                clear(tensor, set_to_none=set_to_none)
            if context is not None:
                for leaves in owners:
                    leaves.mark_cleared(context.local_id)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters; on a replica its own copy of them, see `GroupCopies`."""
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        context = current_replica()
        if context is None:
            return groups
        return context.strategy.extended.mirrors.groups.seen(self, groups, context)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        _check_outside(self, "param_groups")
        vars(self)["param_groups"] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; not on a replica."""
        _check_outside(self, "add_param_group()")
        super().add_param_group(param_group)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state; not on a replica."""
        _check_outside(self, "load_state_dict()")
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        mirrors = owner_of(self)
        if mirrors is not None:
            vars(self)["state"] = SeenState(vars(self)["state"], mirrors)

    def _update_taken(self, context: ReplicaContext, **kwargs: Any) -> Any:
        take_gradients(self)
        if not kwargs and context.num_local_replicas > 1 and _mirrors_of(self).has_one_memory:
            plain = next(cls for cls in type(self).__mro__[1:] if not issubclass(cls, Once))
            if update_in_shares(self, plain, context):
                _mirrors_of(self).spread(_parameters(self))
                return None
        return self._update(None, **kwargs)

    def _update(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        step = super().step  # type: ignore[misc]
        result = step(**kwargs) if closure is None else step(closure, **kwargs)
        _mirrors_of(self).spread(_parameters(self))
        return result


# torch wraps every `step` to call its hooks; the one that makes the update is wrapped already.
OnceOptimizer.step.hooked = True  # type: ignore[attr-defined]


class OnceScheduler(Once):
    """Comes before the class of a learning-rate scheduler."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes one step for all replicas."""
        context = current_replica()
        step = functools.partial(super().step, *args, **kwargs)  # type: ignore[misc]
        if context is None:
            return step()
        return do_once(context, f"{type(self).__name__}.step()", step)


class OnceScaler(Once):
    """Comes before `GradScaler`: gradients are looked at and unscaled once, when reduced."""

    def unscale_(self, optimizer: Optimizer) -> Any:
        """Unscales the reduced gradients, which the leaves of all replicas then have."""
        return self._once("unscale_()", optimizer, super().unscale_)  # type: ignore[misc]

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Makes one update for all replicas, unless a gradient is infinite."""
        step = functools.partial(super().step, **kwargs)  # type: ignore[misc]
        return self._once("step()", optimizer, step, *args)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the scale once for all replicas."""
        context = current_replica()
        update = functools.partial(super().update, *args, **kwargs)  # type: ignore[misc]
        return update() if context is None else do_once(context, "GradScaler.update()", update)

    def _once(self, what: str, optimizer: Optimizer, method: Callable[..., Any], *args: Any) -> Any:
        context = current_replica()
        if context is None:
            return method(optimizer, *args)

        def work() -> Any:
            take_gradients(optimizer)
            result = method(optimizer, *args)
            for leaves in _leaves(optimizer):
                leaves.take_from_primary()
            return result

        return do_once(context, f"GradScaler.{what}", work)


def make_once(target: Any, mirrors: Mirrors) -> None:
    """Makes an optimizer, scheduler or scaler one that all replicas share."""
    if mirrors.is_single:
        return
    before = _before(target)
    _owners[target] = mirrors
    if not isinstance(target, before):
        cls: Any = type(target)
        target.__class__ = _once_class(before, cls)
    if isinstance(target, Optimizer):
        target.state = SeenState(target.state, mirrors)


def _before(target: Any) -> type:
    if isinstance(target, Optimizer):
        return OnceOptimizer
    return OnceScaler if isinstance(target, GradScaler) else OnceScheduler


@functools.cache
def _once_class(before: type, cls: type) -> type:
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (before, cls), {**namespace, "__doc__": cls.__doc__})


def owner_of(target: Any) -> Mirrors | None:
    """Returns the mirrors that an object belongs to."""
    return _owners.get(target)


def _mirrors_of(target: Any) -> Mirrors:
    mirrors = owner_of(target)
    assert mirrors is not None
    return mirrors


def take_gradients(optimizer: Any) -> None:
    """Gives the primaries the gradients that all replicas have, reduced."""
    owners = _leaves(optimizer)
    _mirrors_of(optimizer).reduce_rest(owners)
    for leaves in owners:
        leaves.show_current_gradient()


def _check_outside(optimizer: Any, what: str) -> None:
    if current_replica() is not None:
        raise ContextError(
            f"`{what}` of {type(optimizer).__name__} was called or set in a step, by each replica. "
            "Do it outside `run`, or once for all replicas: `unisono.once(fn)`, where `fn` does it."
        )


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in vars(optimizer)["param_groups"]:
        yield from group["params"]


def _leaves(optimizer: Any) -> list[Leaves]:
    mirrors = _mirrors_of(optimizer)
    found = (mirrors.leaves_of(parameter) for parameter in _parameters(optimizer))
    return [leaves for leaves in found if leaves is not None]


def _step_with_closures(
    optimizer: Any, context: ReplicaContext, what: str, closure: Callable[[], Any]
) -> Any:
    """Lets an optimizer evaluate the closures of all replicas as one function of their mean."""

    def work(closures: list[Callable[[Any], Any]]) -> list[Any]:
        def evaluate() -> Tensor:
            _mirrors_of(optimizer).spread(_parameters(optimizer))
            losses = [as_tensor(loss) for loss in context.meeting.call_waiting(closures)]
            take_gradients(optimizer)
            given = PerReplica([loss.detach() for loss in losses])
            mean: Tensor = context.strategy.extended.reduce_to(
                ReduceOp.MEAN, given, given.devices[0]
            )
            return mean

        with for_all(context):
            return [optimizer._update(evaluate)] * context.num_local_replicas

    def on_this_replica(meeting: Any) -> Any:
        inner = dataclasses.replace(context, meeting=meeting)
        with entered(inner), torch.enable_grad():
            return closure()

    replica_id = context.local_id
    return context.meeting.meet(replica_id, what, on_this_replica, work)
