"""Refuses to train parameters that belong to no model of the strategy.

All replicas would use them at once, so gradients of several threads would be added up in one place
and not reduced. Objects that a replica creates in a step are its own and may be trained.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import stateless
from torch.optim import Optimizer, lr_scheduler
from torch.utils.weak import WeakIdKeyDictionary

from unisono.contexts import ReplicaContext, current_replica, running_replica
from unisono.errors import ContextError
from unisono.modules.attributes import raw
from unisono.modules.leaves import variable_of
from unisono.modules.mirrors import Mirrors
from unisono.modules.owners import owner_of, parameters_of
from unisono.modules.torch_calls import check_is_own, is_of_another
from unisono.modules.updates import watch_updates
from unisono.sharing import in_place_of

# The number of the replica that made a parameter, module, scheduler or scaler in a step.
_makers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def refuse_outsiders() -> None:
    """From now on, what was made outside is refused in the steps of strategies."""
    watch_updates(_check_optimizer)
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Parameter):
            _made_outside.add(thing)
    make: Any = nn.Parameter.__new__

    @functools.wraps(make)
    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        parameter = make(cls, *args, **kwargs)
        note_maker(parameter)
        return parameter

    nn.Parameter.__new__ = staticmethod(made)  # type: ignore[method-assign]
    call: Any = stateless._functional_call

    @in_place_of(stateless, "_functional_call")
    def checked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _check_functional_call(module)
        return call(module, *args, **kwargs)

    for name in ("scale", "unscale_", "step", "update"):
        _check_before(GradScaler, name)
    for cls in vars(lr_scheduler).values():
        is_scheduler = isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler)
        if is_scheduler and "step" in vars(cls):
            _check_before(cls, "step")


def note_maker(made: Any) -> None:
    """Notes which replica made an object, if one did."""
    context = current_replica()
    if context is not None:
        _makers[made] = context.local_id
    elif isinstance(made, Tensor):
        _made_outside.add(made)


def check_call(target: Any, name: str) -> None:
    """Refuses a call, on a replica, that changes an object which all replicas share."""
    context = _one_of_several()
    if (
        context is not None
        and owner_of(target) is not context.replicas.mirrors
        and _makers.get(target) != context.local_id
    ):
        raise ContextError(
            f"{type(target).__name__}.{name}() was called on a replica, but the object does not "
            f"belong to {context.strategy!r}: every replica would change it. Make it in "
            "`strategy.scope()`, or bring it in with `strategy.mirror()`."
        )


def _one_of_several() -> ReplicaContext | None:
    context = current_replica()
    return None if context is None or context.num_replicas_in_sync == 1 else context


def check_backward(context: ReplicaContext, roots: Iterable[Tensor]) -> None:
    """Refuses a backward pass that would reach a parameter that was made outside.

    It looks at every node of the graph. So it does this in the first run of every step, and in
    others only if the process has parameters at all that could be reached.
    """
    mirrors = context.replicas.mirrors
    if mirrors.is_checked and not _made_outside.are_trained(mirrors):
        return
    mirrors.is_being_checked = True
    for leaf in _leaves_below(root.grad_fn for root in roots):
        owner = mirrors.owners.get(id(leaf))
        if owner is not None and owner.leaves[context.local_id] is leaf:
            continue
        if isinstance(leaf, nn.Parameter):
            if (
                leaf.requires_grad
                and context.num_replicas_in_sync > 1
                and _makers.get(leaf) != context.local_id
                and variable_of(leaf) is None
            ):
                raise ContextError(_message(_owner_of(leaf), leaf, context))
        elif is_of_another(leaf, context):
            raise ContextError(
                f"A tensor of shape {tuple(leaf.shape)} with `requires_grad=True` belongs to no "
                f"model of {context.strategy!r}, so all replicas would add their gradients to it "
                "at once. Make it a parameter of a model in `strategy.scope()`, or a "
                "`unisono.Variable`. Make a tensor that belongs to one replica in the step."
            )


class MadeOutside:
    """The parameters of the process that no replica has made in a step."""

    def __init__(self) -> None:
        # Without callbacks: they would take time, and swallow Ctrl-C.
        self._known: list[weakref.ref[Tensor]] = []
        self._most = 1000
        self._lock = threading.Lock()
        # Another one after every parameter that is added, on any thread.
        self._version = object()

    def add(self, parameter: Tensor) -> None:
        """Adds a parameter, for as long as it lives."""
        with self._lock:
            self._known.append(weakref.ref(parameter))
            if len(self._known) > self._most:
                self._known = [one for one in self._known if one() is not None]
                self._most = 2 * len(self._known) + 1000
            self._version = object()

    def are_trained(self, mirrors: Mirrors) -> bool:
        """Whether one of them requires gradients and belongs to no model of a strategy."""
        versions = self._version, mirrors.generation
        if mirrors.outsiders[0] != versions:
            found = [known for known in list(self._known) if id(known()) not in mirrors.owners]
            mirrors.outsiders = versions, found
        # Asked every time: they can be frozen, and unfrozen.
        return any((x := one()) is not None and x.requires_grad for one in mirrors.outsiders[1])


_made_outside = MadeOutside()


def _leaves_below(nodes: Iterable[Any]) -> Iterator[Tensor]:
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        current = waiting.pop()
        if current is None:
            continue
        leaf = getattr(current, "variable", None)
        if leaf is not None:
            yield leaf
        for following, _ in reversed(current.next_functions):
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def _message(module: nn.Module | None, parameter: Tensor, context: ReplicaContext) -> str:
    what = "A model" if module is None else type(module).__name__
    names = () if module is None else module.named_parameters()
    named = next((f"{name!r}, " for name, one in names if one is parameter), "")
    parameters = f"parameters ({named}shape {tuple(parameter.shape)})"
    check_is_own(parameter, context)
    if context.replicas.mirrors.leaves_of(parameter) is not None:
        return (
            f"{what} uses {parameters} of a model of {context.strategy!r}, but not the "
            "replica's copies: TorchScript modules and custom functions keep the parameters they "
            "were made with, and threads that a step starts see those of the program. Call the "
            "model itself in the step, or pass its parameters there."
        )
    if module is not None and owner_of(module) is not None:
        return (
            f"{what} was made under another strategy than {context.strategy!r}, which runs the "
            "step. Make the model and its optimizer again in the scope of this strategy, or run "
            "the step with the other one."
        )
    return (
        f"{what} has {parameters} that belong to no model of {context.strategy!r}, so all replicas "
        "would train them at once. Make the model in `strategy.scope()`, or bring it in with "
        "`strategy.mirror(model)`. If the step only reads it, freeze it with "
        "`requires_grad_(False)` or call it under `torch.no_grad()`."
    )


def _owner_of(parameter: Tensor) -> nn.Module | None:
    """Returns the outermost module that has the parameter, among all objects of the process."""
    found = _holder_of(parameter, "_parameters", [])
    outer, seen = found, [found]
    while outer is not None:
        found = outer
        outer = _holder_of(found, "_modules", seen)
        seen.append(outer)
    return found


def _holder_of(thing: object, table: str, others: list[nn.Module | None]) -> nn.Module | None:
    """Returns a module that has `thing` in a table, but for `others`.

    It asks for what refers to `thing`, and never for all objects: another thread cannot finish a
    tuple that somebody else holds.
    """
    near: list[Any] = [thing]
    # The table, the attributes of the module, and the module.
    for _ in range(3):
        near = [one for one in gc.get_referrers(*near) if issubclass(type(one), (dict, nn.Module))]
        for one in near:
            if isinstance(one, nn.Module) and all(one is not other for other in others):
                held = raw(one).get(table) or {}
                if any(thing is value for value in held.values()):
                    return one
    return None


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses an optimizer that several replicas would step, or whose parameters they share."""
    context, owner = _one_of_several(), owner_of(optimizer)
    if context is not None:
        _check_optimizer_of_replica(optimizer, context)
    elif owner is not None and running_replica() is None:
        # Replicas may have written gradients that nothing shows.
        found = map(owner.leaves_of, parameters_of(optimizer))
        owner.reduce_rest([one for one in found if one is not None and one.is_hidden()])
    elif owner is not None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and owner.leaves_of(parameter) is None:
                raise ContextError(
                    f"{type(optimizer).__name__} is given a parameter of shape "
                    f"{tuple(parameter.shape)} that belongs to no model of the strategy, so all "
                    "replicas wrote to its gradient at once. Bring a copied or loaded model in "
                    "with `strategy.mirror()`, and make a tensor a `Variable`."
                )


def _check_optimizer_of_replica(optimizer: Optimizer, context: ReplicaContext) -> None:
    name = type(optimizer).__name__
    if owner_of(optimizer) is context.replicas.mirrors:
        raise ContextError(
            f"`{name}.step` was looked up before `run`, so every replica would make the update. "
            "Call `optimizer.step()` in the step instead."
        )
    parameters = parameters_of(optimizer)
    if all(_makers.get(parameter) == context.local_id for parameter in parameters):
        return
    mirrors = context.replicas.mirrors
    is_known = any(mirrors.leaves_of(parameter) is not None for parameter in parameters)
    what = "it does not belong to" if is_known else "its parameters belong to no model of"
    raise ContextError(
        f"{name}.step() was called on a replica, but {what} {context.strategy!r}: all replicas "
        "would write to them at once. Make the model and the optimizer in `strategy.scope()`, or "
        "bring them in with `strategy.mirror()`."
    )


def _check_functional_call(module: nn.Module) -> None:
    """Refuses a call of a module into which several replicas would put tensors."""
    context = _one_of_several()
    if context is None or _makers.get(module) == context.local_id:
        return
    mirrors = context.replicas.mirrors
    if id(module) not in mirrors.mirrors and mirrors.of_program(module) is module:
        raise ContextError(
            f"`functional_call` was given a {type(module).__name__} that belongs to no model of "
            f"{context.strategy!r}. It puts the tensors into the module while it runs, and all "
            "replicas would do so at once. Make the module in `strategy.scope()`, or copy it in "
            "the step with `copy.deepcopy(module)`."
        )


def _check_before(cls: Any, name: str) -> None:
    """Lets a method of a scheduler or scaler refuse to work for several replicas at once."""
    method: Callable[..., Any] = getattr(cls, name)

    @in_place_of(cls, name)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_call(self, name)
        return method(self, *args, **kwargs)
