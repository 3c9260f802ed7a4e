"""What belongs to no model of a strategy must not be trained on its replicas.

All replicas would use it at once: gradients of several threads would be added up in one place,
and nobody would reduce them. What a replica makes itself in a step is its own and may be trained.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from unisono.contexts import ReplicaContext, current_replica, is_inside_run
from unisono.errors import ContextError
from unisono.variables.containers import variable_of
from unisono.variables.mirrors import Mirrors
from unisono.variables.once import owner_of, parameters_of

# The number of the replica that made a parameter in a step.
_makers: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Schedulers and scalers that a replica made in a step.
_made_in_steps: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def refuse_outsiders() -> None:
    """From now on, what was made outside is refused in the steps of strategies."""
    register_optimizer_step_pre_hook(_check_optimizer)
    make: Any = nn.Parameter.__new__

    @functools.wraps(make)
    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        parameter = make(cls, *args, **kwargs)
        note_maker(parameter)
        return parameter

    nn.Parameter.__new__ = staticmethod(made)  # type: ignore[assignment]
    for name in ("scale", "unscale_", "step", "update"):
        _check_before(GradScaler, name)
    for cls in vars(lr_scheduler).values():
        is_scheduler = isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler)
        if is_scheduler and "step" in vars(cls):
            _check_before(cls, "step")


def note_maker(parameter: Tensor) -> None:
    """Notes which replica made a parameter, if one did."""
    context = current_replica()
    if context is not None:
        _makers[parameter] = context.local_id


def note_made_in_step(made: Any) -> None:
    """Notes that a replica made a scheduler or scaler."""
    _made_in_steps.add(made)


def is_outsider(parameter: Tensor, context: ReplicaContext) -> bool:
    """Whether a parameter that is no leaf of the replica was made outside, and is trained."""
    return (
        parameter.requires_grad
        and context.num_replicas_in_sync > 1
        and _makers.get(parameter) != context.local_id
        and variable_of(parameter) is None
    )


def note_use(context: ReplicaContext, parameter: Tensor, result: Any) -> None:
    """Notes that gradients may flow back from a result to a parameter that was made outside."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    is_tracked = any(isinstance(one, Tensor) and one.grad_fn is not None for one in found)
    if is_tracked and is_outsider(parameter, context):
        noted = context.notes.setdefault("outsiders", {})
        if id(parameter) not in noted:
            noted[id(parameter)] = _user_of(parameter)


def check_graph(mirrors: Mirrors, context: ReplicaContext, root: Tensor) -> None:
    """Refuses a backward pass that would reach a parameter that was made outside.

    It looks at every node of the graph. So it does this only where such a parameter was used, and
    in the first run of every model: there it finds parameters in TorchScript and custom functions.
    """
    noted = context.notes.get("outsiders", {})
    if mirrors.is_checked and not noted:
        return
    mirrors.is_being_checked = True
    own = mirrors.stand_ins[context.local_id]
    for leaf in _leaves_below(root.grad_fn):
        is_foreign = isinstance(leaf, nn.Parameter) and own.get(id(leaf)) is not leaf
        if is_foreign and is_outsider(leaf, context):
            raise ContextError(_message(noted.get(id(leaf)), leaf, context))


def _leaves_below(node: Any) -> Iterator[Tensor]:
    seen, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        if current is None:
            continue
        leaf = getattr(current, "variable", None)
        if leaf is not None:
            yield leaf
        new = {one for one, _ in current.next_functions} - seen
        seen |= new
        waiting.extend(new)


def _message(module: nn.Module | None, parameter: Tensor, context: ReplicaContext) -> str:
    what = "A model" if module is None else type(module).__name__
    name = None if module is None else _name_in(module, parameter)
    named = f"{name!r}, " if name else ""
    return (
        f"{what} has parameters ({named}shape {tuple(parameter.shape)}) that belong to no model of "
        f"{context.strategy!r}, so all replicas would train them at once and nobody would reduce "
        "their gradients. Make the model in `strategy.scope()`, or bring it in with "
        "`strategy.mirror(model)`. One that is only read is frozen with `requires_grad_(False)`, "
        "or called under `torch.no_grad()`."
    )


def _name_in(module: nn.Module, parameter: Tensor) -> str | None:
    return next((n for n, one in module.named_parameters() if one is parameter), None)


def _user_of(parameter: Tensor) -> nn.Module | None:
    """Returns the outermost module under way in this thread that has the parameter."""
    found, frame = None, sys._getframe()
    while frame is not None:
        user = frame.f_locals.get("self")
        if isinstance(user, nn.Module) and any(parameter is one for one in user.parameters()):
            found = user
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses an optimizer that several replicas would step, or whose parameters they share."""
    context = current_replica()
    owner = owner_of(optimizer)
    if context is not None and context.num_replicas_in_sync > 1:
        _check_optimizer_of_replica(optimizer, context)
    elif owner is not None and is_inside_run():
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and owner.leaves_of(parameter) is None:
                raise ContextError(
                    f"{type(optimizer).__name__} is given a parameter of shape "
                    f"{tuple(parameter.shape)} that belongs to no model of the strategy, so all "
                    "replicas have written to its one gradient at once. A model that is copied or "
                    "loaded is brought in with `strategy.mirror()`, a tensor is made a `Variable`."
                )


def _check_optimizer_of_replica(optimizer: Optimizer, context: ReplicaContext) -> None:
    name = type(optimizer).__name__
    if owner_of(optimizer) is context.strategy.extended.mirrors:
        raise ContextError(
            f"`{name}.step` was kept from before the run, so every replica would make the update. "
            "Call `optimizer.step()` in the step instead."
        )
    if all(_makers.get(parameter) == context.local_id for parameter in parameters_of(optimizer)):
        return
    raise ContextError(
        f"{name}.step() was called on a replica, but its parameters belong to no model of "
        f"{context.strategy!r}: all replicas would write to them at once. Make model and optimizer "
        "in `strategy.scope()`, or bring them in with `strategy.mirror()`."
    )


def _check_before(cls: Any, name: str) -> None:
    """Lets a method of a scheduler or scaler refuse to work for several replicas at once."""
    method: Callable[..., Any] = getattr(cls, name)

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_replica()
        if context is not None and context.num_replicas_in_sync > 1:
            is_own = self in _made_in_steps or owner_of(self) is context.strategy.extended.mirrors
            if not is_own:
                raise ContextError(
                    f"{type(self).__name__}.{name}() was called on a replica, but the object does "
                    f"not belong to {context.strategy!r}: every replica would change it. Make it "
                    "in `strategy.scope()`, or bring it in with `strategy.mirror()`."
                )
        return method(self, *args, **kwargs)

    setattr(cls, name, checked)
