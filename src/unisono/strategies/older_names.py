"""What strategies were asked for in TensorFlow 1.12 and before: it works, and says today's name."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.strategies.strategy import Strategy

# Where the same thing, with the same arguments, is found today.
_MOVED = {
    "batch_reduce": "extended.batch_reduce_to",
    "between_graph": "extended.experimental_between_graph",
    "broadcast": "extended.broadcast_to",
    "colocate_vars_with": "extended.colocate_vars_with",
    "experimental_run_v2": "run",
    "finalize": "experimental_finalize",
    "initialize": "experimental_initialize",
    "non_slot_devices": "extended.non_slot_devices",
    "num_towers": "num_replicas_in_sync",
    "parameter_devices": "extended.parameter_devices",
    "read_var": "extended.read_var",
    "run_steps_on_dataset": "extended.experimental_run_steps_on_iterator",
    "should_checkpoint": "extended.should_checkpoint",
    "should_init": "extended.experimental_should_init",
    "should_save_summary": "extended.should_save_summary",
    "value_container": "extended.value_container",
    "worker_devices": "extended.worker_devices",
}


def _call_for_each_tower(strategy: Strategy) -> Callable[..., Any]:
    def call_for_each_tower(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Replicas always run at the same time.
        kwargs.pop("run_concurrently", None)
        return strategy.run(fn, args=args, kwargs=kwargs)

    return call_for_each_tower


def _update(strategy: Strategy) -> Callable[..., Any]:
    def update(var: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group = kwargs.pop("grouped", True)
        return strategy.extended.update(var, fn, args, kwargs, group)

    return update


def _update_non_slot(strategy: Strategy) -> Callable[..., Any]:
    def update_non_slot(devices: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group = kwargs.pop("grouped", True)
        return strategy.extended.update_non_slot(devices, fn, args, kwargs, group)

    return update_non_slot


def _distribute_dataset(strategy: Strategy) -> Callable[..., Any]:
    return lambda dataset_fn: strategy.experimental_distribute_dataset(dataset_fn())


# What has other arguments today, or another meaning.
_CHANGED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "call_for_each_tower": ("run", _call_for_each_tower),
    "distribute_dataset": ("experimental_distribute_dataset", _distribute_dataset),
    "is_single_tower": ("num_replicas_in_sync == 1", lambda s: s.num_replicas_in_sync == 1),
    "update": ("extended.update", _update),
    "update_non_slot": ("extended.update_non_slot", _update_non_slot),
}


def older_name(strategy: Strategy, name: str) -> Any:
    """Returns what `strategy.name` was, with a warning that says what to write today."""
    if name in _MOVED:
        today = _MOVED[name]
        find: Callable[[Any], Any] = operator.attrgetter(today)
    elif name in _CHANGED:
        today, find = _CHANGED[name]
    else:
        raise AttributeError(f"{type(strategy).__name__!r} has no attribute {name!r}.")
    warnings.warn(
        f"`strategy.{name}` is an older name; write `strategy.{today}`.",
        DeprecationWarning,
        stacklevel=3,
    )
    return find(strategy)
