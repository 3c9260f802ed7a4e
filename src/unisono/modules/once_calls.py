"""Objects that all replicas share and that do their work once: optimizers, schedulers, scalers.

Every replica calls `optimizer.step()`, which is a barrier, and one update is made for all. For
this, the object has a subclass of its class, with the same name, while replicas run.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from unisono.contexts import ReplicaContext, current_replica, entered
from unisono.errors import ContextError
from unisono.modules import owners
from unisono.modules.for_all import do_once, for_all
from unisono.modules.front import Front, plain_class
from unisono.modules.leaves import (
    clear_gradients,
    give_gradients,
    show_current_gradients,
    spread,
)
from unisono.modules.mirrors import Mirrors
from unisono.modules.updates import (
    Settings,
    is_plain,
    update_plainly,
    watch_updates,
)
from unisono.options import ReduceOp
from unisono.sharing import computed_once
from unisono.torch_private import no_torch_function
from unisono.values import PerReplica, as_tensor

_scaler_lock = threading.Lock()


class OnceStep:
    """The `step` of an optimizer that makes one update for all replicas."""

    def __get__(self, optimizer: Any, cls: type | None = None) -> Any:
        return _step if optimizer is None else types.MethodType(_step, optimizer)

    def __set__(self, optimizer: Any, step: Any) -> None:
        vars(optimizer)["step"] = step

    def __delete__(self, optimizer: Any) -> None:
        vars(optimizer).pop("step", None)


def _step(optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    """Makes one update for all replicas, with the gradients that they have reduced."""
    context = current_replica()
    what, is_alone = f"{type(optimizer).__name__}.step()", not isinstance(optimizer, OnceOptimizer)
    if context is None or (closure is not None and is_alone):
        return optimizer._update(closure, **kwargs)
    if closure is not None:
        return _step_with_closures(optimizer, context, what, closure)
    is_recorded = context.meeting.recorder is not None and not kwargs
    settings = Settings(optimizer, owners.found_of(optimizer).leaves) if is_recorded else None
    if is_alone:
        return do_once(what, lambda: optimizer._update(None, **kwargs), settings)
    if not kwargs and optimizer._is_put_off(context):
        return None
    return do_once(what, lambda: optimizer._update_taken(context, **kwargs), settings)


# torch wraps every `step`, to call hooks and to see that a scheduler does not come before it; the
# one that makes the update is wrapped already.
_step.hooked = True  # type: ignore[attr-defined]
_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


class OnceUpdate(Front):
    """Comes before the class of an optimizer of one replica while its run is recorded."""

    step = OnceStep()

    def _update(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        step = vars(self).get("step") or super().step  # type: ignore[misc]
        return step(**kwargs) if closure is None else step(closure, **kwargs)


class OnceOptimizer(OnceUpdate):
    """Comes before the class of an optimizer while replicas run."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients of this replica; outside a replica, those of all."""
        if plain_class(type(self)).zero_grad is Optimizer.zero_grad:
            self._clear(*args, **kwargs)
        else:
            # It may clear more, or less.
            super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _clear(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as in torch
        context = current_replica()
        # The primaries themselves are cleared, too, and not only the leaves that they stand for.
        with no_torch_function():
            if context is not None:
                leaves = owners.found_of(self).leaves
                clear_gradients(leaves, context.local_id, set_to_none=set_to_none)
            else:
                super().zero_grad(set_to_none)  # type: ignore[misc]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters; on a replica its own copy of them, see `GroupCopies`."""
        groups: list[dict[str, Any]] | None = vars(self).get("param_groups")
        if groups is None:
            # Those of another optimizer, which it wraps.
            return super().param_groups  # type: ignore[misc,no-any-return]
        context = current_replica()
        if context is None:
            return groups
        context.replicas.mirrors.postponed.make()
        return context.replicas.mirrors.groups.seen(self, groups, context)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        _check_outside(self, "param_groups")
        _set_table(self, "param_groups", groups)

    @property
    def state(self) -> dict[Any, Any]:
        """The state, which a replica finds under its own parameters, too."""
        if (context := current_replica()) is not None:
            context.replicas.mirrors.postponed.make()
        state: dict[Any, Any] | None = vars(self).get("state")
        if state is None:
            return super().state  # type: ignore[misc,no-any-return]
        return owners.seen_state(self, owners.mirrors_of(self))

    @state.setter
    def state(self, state: dict[Any, Any]) -> None:
        _set_table(self, "state", state)

    def _is_put_off(self, context: ReplicaContext) -> bool:
        """Lets the update wait until the run is complete, if nothing in it can tell."""
        mirrors, cls = owners.mirrors_of(self), plain_class(type(self))
        is_alone = context.num_local_replicas == 1 and context.meeting.recorder is None
        if not (is_alone and mirrors.postponed.can_wait()) or not is_plain(self, cls):
            return False
        if not hasattr(vars(self).get("step", _step), "_wrapped_by_lr_sched"):
            return False
        with no_torch_function():
            mirrors.watch.check()
            mirrors.groups.settle(1)
            take_gradients(self)
            parameters = owners.parameters_of(self)
            grads = [p.grad for p in parameters]
            state = owners.tensors_in(vars(self)["state"])
            held = [*parameters, *(one for one in grads if one is not None), *state]
            if not all(one.layout is torch.strided for one in held):
                return False
            addresses = list(map(Tensor.data_ptr, held))

        def update() -> None:
            with no_torch_function():
                # The step may have cleared them since then.
                now = [p.grad for p in parameters]
                give_gradients(parameters, grads)
                with for_all(context):
                    self._update(None) if isinstance(self, Front) else self.step()
                give_gradients(parameters, now)

        mirrors.postponed.put_off(update, addresses)
        return True

    def _update_taken(self, context: ReplicaContext, **kwargs: Any) -> Any:
        found = take_gradients(self)
        own, cls = vars(self).get("step", _step), plain_class(type(self))
        recorder = context.meeting.recorder
        is_eager = recorder is None or recorder.is_on_host
        is_wrapped = hasattr(own, "_wrapped_by_lr_sched") and is_eager
        # `outsiders` checks other parameters than those of models, before every update of torch.
        is_known = len(found.leaves) == len(found.parameters)
        is_shared = not (owners.mirrors_of(self).is_spread or kwargs)
        if not (is_wrapped and is_known and is_shared and is_plain(self, cls)):
            return self._update(None, **kwargs)
        # What the scheduler's wrapper does, which is not called here.
        self._opt_called = True
        update_plainly(self, cls, context, found.num_bytes)
        spread(found.of_variables)
        return None

    def _update(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        result = super()._update(closure, **kwargs)
        spread(owners.found_of(self).of_variables)
        return result


class OnceScheduler(Front):
    """Comes before the class of a learning-rate scheduler. Replicas give the same arguments."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes one step for all replicas, which give the same arguments."""
        step = functools.partial(super().step, *args, **kwargs)  # type: ignore[misc]
        return do_once(f"{type(self).__name__}.step()", step, given=(*args, *kwargs.values()))


class OnceScaler(Front):
    """Comes before `GradScaler`: gradients are looked at and unscaled once, when reduced."""

    def unscale_(self, optimizer: Optimizer) -> Any:
        """Unscales the reduced gradients, which the leaves of all replicas then have."""
        return self._once("unscale_()", optimizer, super().unscale_)  # type: ignore[misc]

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Makes one update for all replicas, unless a gradient is infinite."""
        step = functools.partial(super().step, **kwargs)  # type: ignore[misc]
        return self._once("step()", optimizer, step, *args)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the scale once for all replicas, which give the same arguments."""
        update = functools.partial(super().update, *args, **kwargs)  # type: ignore[misc]
        return do_once("GradScaler.update()", update, given=(*args, *kwargs.values()))

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Makes the scale in the first call of `scale`, for which several replicas may come."""
        with _scaler_lock:
            if self._growth_tracker is None:  # type: ignore[attr-defined]
                super()._lazy_init_scale_growth_tracker(dev)  # type: ignore[misc]

    def _once(self, what: str, optimizer: Optimizer, method: Callable[..., Any], *args: Any) -> Any:
        context = current_replica()

        def work() -> Any:
            if context is None:
                return method(optimizer, *args)
            take_gradients(optimizer)
            result = method(optimizer, *args)
            for leaves in owners.found_of(optimizer).leaves:
                # torch does not count it as a write when gradients are unscaled.
                leaves.give_gradient()
            return result

        return do_once(f"GradScaler.{what}", work)


def make_once(target: Any, mirrors: Mirrors) -> None:
    """Makes all replicas share an optimizer, scheduler or scaler."""
    before: type = OnceScaler if isinstance(target, GradScaler) else OnceScheduler
    if isinstance(target, Optimizer):
        before = OnceUpdate if mirrors.is_single else OnceOptimizer
    if mirrors.is_single:
        # It is a plain object, but for runs that are recorded.
        mirrors.fronts.add(target, before)
        return
    if owners.owner_of(target) is not mirrors:
        owners.give_to(target, mirrors)
        mirrors.fronts.add(target, before, is_at_once=True)
        if mirrors.is_spread:
            _spread_after_updates()


def take_gradients(optimizer: Any) -> owners.Found:
    """Gives the primaries the gradients that all replicas have, reduced."""
    found = owners.found_of(optimizer)
    if found.leaves:
        owners.mirrors_of(optimizer).reduce_rest(found.leaves)
    show_current_gradients(found.leaves)
    return found


def _outside_only(name: str) -> Any:
    @functools.wraps(getattr(Optimizer, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_outside(self, f"{name}()")
        return getattr(super(OnceOptimizer, self), name)(*args, **kwargs)

    return method


# A hook that every replica registers would be called once for each of them.
_HOOKS = [name for name in vars(Optimizer) if name.startswith("register_")]
for _name in ("add_param_group", "load_state_dict", *_HOOKS):
    setattr(OnceOptimizer, _name, _outside_only(_name))


def _set_table(optimizer: Any, name: str, value: Any) -> None:
    """Sets `param_groups` or `state`; of one that wraps another as its class does."""
    shown = getattr(plain_class(type(optimizer)), name, None)
    if isinstance(shown, property):
        shown.__set__(optimizer, value)
    else:
        vars(optimizer)[name] = value


def _check_outside(optimizer: Any, what: str) -> None:
    if current_replica() is not None:
        raise ContextError(
            f"`{what}` of {type(optimizer).__name__} was called or set on a replica. Do it outside "
            "`run`, or once for all replicas with `unisono.once(fn)`."
        )


@computed_once
def _spread_after_updates() -> None:
    """Gives other memories what an update writes, which torch does not count if it is fused."""

    def after(optimizer: Optimizer, *_: Any) -> None:
        if owners.owner_of(optimizer) is not None:
            spread([one for one in owners.found_of(optimizer).leaves if one.is_spread])

    watch_updates(after, hooks.register_optimizer_step_post_hook)


def _step_with_closures(
    optimizer: Any, context: ReplicaContext, what: str, closure: Callable[[], Any]
) -> Any:
    """Lets an optimizer evaluate the closures of all replicas as one function of their mean."""

    def work(closures: list[Callable[[Any], Any]]) -> list[Any]:
        def evaluate() -> Tensor:
            spread(owners.found_of(optimizer).leaves)
            # What was written so far was written for all replicas.
            owners.mirrors_of(optimizer).watch.stamp()
            losses = [as_tensor(loss) for loss in context.meeting.call_waiting(closures)]
            take_gradients(optimizer)
            replicas = context.replicas
            given = PerReplica.placed(
                tuple(loss.detach() for loss in losses),
                replicas.worker_devices,
                replicas.counting.samples,
            )
            mean: Tensor = replicas.reduce_to(ReduceOp.MEAN, given, given.devices[0])
            return mean

        with for_all(context):
            return [optimizer._update(evaluate)] * context.num_local_replicas

    def on_this_replica(meeting: Any) -> Any:
        inner = dataclasses.replace(context, meeting=meeting)
        with entered(inner), torch.enable_grad():
            return closure()

    replica_id, recorder = context.local_id, context.meeting.recorder
    if recorder is not None:
        recorder.refuse(f"{what} evaluates a closure")
    return context.meeting.meet(replica_id, what, on_this_replica, work)
