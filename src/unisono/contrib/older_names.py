"""What strategies were asked for in TensorFlow 1.12 and before: it works, and says today's name."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.arguments import check_callable, warn_of_older
from unisono.errors import UnsupportedError
from unisono.input import DistributedDatasetsFromFunction, DistributedIterator
from unisono.options import VariableAggregation
from unisono.reductions import always_mirrored, listed_destinations, listed_pairs
from unisono.values import DistributedValues, Mirrored, PerReplica

if TYPE_CHECKING:
    from unisono.strategies.strategy import Strategy

# Where the same thing, with the same arguments, is found today.
_MOVED = {
    "between_graph": "extended.experimental_between_graph",
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


def _call_for_each_tower(
    strategy: Strategy, fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    # Replicas always run at the same time.
    kwargs.pop("run_concurrently", None)
    return strategy.run(fn, args=args, kwargs=kwargs)


def _grouped(
    name: str, strategy: Strategy, where: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    group = kwargs.pop("grouped", True)
    return getattr(strategy.extended, name)(where, fn, args, kwargs, group)


class PerDeviceDataset(DistributedDatasetsFromFunction):
    """What `distribute_dataset` returned: each replica gets a whole batch of the dataset."""

    def make_one_shot_iterator(self) -> DistributedIterator:
        """Returns an iterator."""
        return iter(self)

    make_initializable_iterator = make_one_shot_iterator


def _distribute_dataset(strategy: Strategy, dataset_fn: Callable[[], Any]) -> PerDeviceDataset:
    check_callable("dataset_fn", dataset_fn)
    return PerDeviceDataset(
        lambda _: dataset_fn(),
        strategy._input_context,
        strategy.extended.worker_devices,
        workers=strategy.extended.workers,
    )


def reduced(strategy: Strategy, aggregation: Any, value: Any, destinations: Any) -> Mirrored:
    """Does what `strategy.reduce(aggregation, value, destinations)` did: gives a `Mirrored`."""
    warnings.warn(
        "`strategy.reduce(aggregation, value, destinations)` is an older form; write "
        "`strategy.extended.reduce_to(reduce_op, value, destinations)`.",
        DeprecationWarning,
        stacklevel=3,
    )
    extended = strategy.extended
    if destinations is None:
        is_here = isinstance(value, DistributedValues)
        destinations = value if is_here else extended.worker_devices
    targets = listed_destinations(destinations)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        first = extended.workers.of_chief(strategy.experimental_local_results(value)[0])
        return always_mirrored(extended.broadcast_to(first, targets), targets)
    if aggregation is VariableAggregation.NONE:
        raise UnsupportedError(f"`aggregation` must be SUM or MEAN here, got {aggregation}.")
    return always_mirrored(extended.reduce_to(aggregation.reduce_op, value, targets), targets)


def _broadcast(strategy: Strategy, tensor: Any, destinations: Any = None) -> Mirrored:
    extended = strategy.extended
    targets = listed_destinations(extended.worker_devices if destinations is None else destinations)
    return always_mirrored(extended.broadcast_to(tensor, targets), targets)


def _batch_reduce(
    strategy: Strategy, aggregation: Any, value_destination_pairs: Any
) -> list[Mirrored]:
    given = listed_pairs(value_destination_pairs)
    pairs = [(value, listed_destinations(to)) for value, to in given]
    op = getattr(aggregation, "reduce_op", None) or aggregation
    results = strategy.extended.batch_reduce_to(op, pairs)
    return [always_mirrored(r, to) for r, (_, to) in zip(results, pairs, strict=True)]


def _worker_device_index(strategy: Strategy) -> Any:
    devices = strategy.extended.worker_devices
    return 0 if len(devices) == 1 else PerReplica(range(len(devices)), devices)


# Methods that have other arguments today, or another meaning.
_CHANGED: dict[str, tuple[str, Callable[..., Any]]] = {
    "batch_reduce": ("extended.batch_reduce_to", _batch_reduce),
    "broadcast": ("extended.broadcast_to", _broadcast),
    "call_for_each_tower": ("run", _call_for_each_tower),
    "distribute_dataset": ("distribute_datasets_from_function", _distribute_dataset),
    "update": ("extended.update", partial(_grouped, "update")),
    "update_non_slot": ("extended.update_non_slot", partial(_grouped, "update_non_slot")),
}
# Attributes that are computed from those of today.
_COMPUTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "is_single_tower": ("num_replicas_in_sync == 1", lambda s: s.num_replicas_in_sync == 1),
    "worker_device_index": ("extended.worker_devices", _worker_device_index),
}


def older_name(strategy: Strategy, name: str) -> Any:
    """Returns what `strategy.name` was, with a warning that says what to write today."""
    if name in _MOVED:
        today = _MOVED[name]
        find: Callable[..., Any] = operator.attrgetter(today)
    elif name in _COMPUTED:
        today, find = _COMPUTED[name]
    elif name in _CHANGED:
        today, method = _CHANGED[name]
        find = partial(partial, method)
    else:
        raise AttributeError(f"{type(strategy).__name__!r} object has no attribute {name!r}")
    warn_of_older(f"strategy.{name}", f"strategy.{today}", is_deeper=True)
    return find(strategy)
