"""Every public callable: functions, constructors, and the methods of one object of each class."""

from __future__ import annotations

import enum
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import unisono as uo
from unisono import cluster_resolver, contrib, experimental, hooks, testing, tracing

MODULES = (uo, experimental, contrib, cluster_resolver, hooks, testing, tracing)

# Why a name is left out.
_ENDS = "ends what other calls use"
_MADE_BY_US = "the library makes it, from what it has checked"
_CALLED_BY_US = "the library calls it, with what it has checked"
LEFT_OUT = {
    "close": _ENDS,
    "experimental_finalize": _ENDS,
    "record_if_asked": "reads the environment alone",
    "join_workers": _CALLED_BY_US,
    "placed": _CALLED_BY_US,
    "span": _CALLED_BY_US,
    "Span": _MADE_BY_US,
    "Trace": _MADE_BY_US,
    "DistributedDataset": _MADE_BY_US,
    "DistributedIterator": _MADE_BY_US,
    "GradBucket": _MADE_BY_US,
    "ReplicaContext": _MADE_BY_US,
    "WorkersGroup": _MADE_BY_US,
    # Of strategies, for the library.
    "adopt": _CALLED_BY_US,
    "bind": _CALLED_BY_US,
    "bring_in": _CALLED_BY_US,
    "merge_call": _CALLED_BY_US,
    "replaying": _CALLED_BY_US,
    "run_eagerly": _CALLED_BY_US,
    # Of cross-device operations: what a subclass overrides, or the library asks of it.
    "reduce_implementation": _CALLED_BY_US,
    "batch_reduce_implementation": _CALLED_BY_US,
    "broadcast_implementation": _CALLED_BY_US,
    "reduce_gradients_implementation": _CALLED_BY_US,
    "reduce_in_place": _CALLED_BY_US,
    "all_reduce_schedule": _CALLED_BY_US,
    "cost": _CALLED_BY_US,
    "is_one_sum": _CALLED_BY_US,
    "reduce_dense": _CALLED_BY_US,
    "reduce_packs": _CALLED_BY_US,
    "reduce_plain": _CALLED_BY_US,
    "root": _CALLED_BY_US,
    "route": _CALLED_BY_US,
    "schedule": _CALLED_BY_US,
    # Of inputs, for their iterators.
    "open": _CALLED_BY_US,
    "parts": _CALLED_BY_US,
    # Of values: torch functions call it.
    "apart": _CALLED_BY_US,
    # Of distributed datasets.
    "begin": _CALLED_BY_US,
    "split": _CALLED_BY_US,
    "resume": _CALLED_BY_US,
    # Of a configuration.
    "leader_rank": _CALLED_BY_US,
    "visible": _CALLED_BY_US,
}


class Target(NamedTuple):
    """What is called, and the names of its parameters."""

    name: str
    call: Callable[..., Any]
    signature: inspect.Signature


def targets(strategies: dict[str, uo.Strategy]) -> Iterator[Target]:
    """Yields all of them; `strategies` are what methods of strategies are called on."""
    seen: set[int] = set()
    for module in MODULES:
        for name in dir(module) if module is contrib else module.__all__:
            thing = _member(module, name)
            if name.startswith("_") or not callable(thing) or id(thing) in seen:
                continue
            if isinstance(thing, enum.EnumMeta):
                continue  # Python itself makes members, and says what there is.
            if not getattr(thing, "__module__", "").startswith("unisono") or name in LEFT_OUT:
                continue
            seen.add(id(thing))
            yield from _target(f"{module.__name__}.{name}", thing)
    for name, thing in _objects(strategies).items():
        yield from _methods(name, thing)
    for name in ("merge_call", "all_reduce", "all_gather"):
        yield _on_replica(strategies["mirrored"], name)


def _member(module: Any, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(module, name)


def _target(name: str, call: Callable[..., Any]) -> Iterator[Target]:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return
    if signature.parameters:
        yield Target(name, call, signature)


def _methods(name: str, thing: Any) -> Iterator[Target]:
    for key in dir(type(thing)):
        if key.startswith("_") or key in LEFT_OUT:
            continue
        if inspect.isroutine(inspect.getattr_static(type(thing), key)):
            yield from _target(f"{name}.{key}", getattr(thing, key))


def _on_replica(strategy: uo.Strategy, name: str) -> Target:
    def call(*args: Any, **kwargs: Any) -> Any:
        return strategy.run(lambda: getattr(uo.get_replica_context(), name)(*args, **kwargs))

    method = getattr(uo.ReplicaContext, name)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return Target(f"ReplicaContext.{name}", call, inspect.Signature(parameters))


def _objects(strategies: dict[str, uo.Strategy]) -> dict[str, Any]:
    mirrored = strategies["mirrored"]
    with mirrored.scope():
        variable = uo.Variable(torch.ones(2, 3), aggregation=uo.VariableAggregation.SUM)
        on_read = uo.Variable(
            torch.ones(2),
            synchronization=uo.VariableSynchronization.ON_READ,
            aggregation=uo.VariableAggregation.SUM,
        )
    dataset = mirrored.experimental_distribute_dataset([torch.ones(4, 2)] * 3)
    return {
        **strategies,
        **{f"{name}.extended": one.extended for name, one in strategies.items()},
        "Variable": variable,
        "Variable on read": on_read,
        "PerReplica": uo.PerReplica([torch.ones(2), torch.ones(2)]),
        "Mirrored": uo.Mirrored([torch.ones(2), torch.ones(2)]),
        "Device": uo.Device("cpu", 0),
        "ReductionToOneDevice": uo.ReductionToOneDevice(),
        "HierarchicalCopyAllReduce": uo.HierarchicalCopyAllReduce(),
        "NcclAllReduce": uo.NcclAllReduce(),
        "AllReduceCrossDeviceOps": contrib.AllReduceCrossDeviceOps(),
        "AllReduceCrossTowerOps": _member(contrib, "AllReduceCrossTowerOps")(),
        "CommunicationOptions": experimental.CommunicationOptions(),
        "InputContext": uo.InputContext(),
        "DistributedDataset": dataset,
        "DistributedIterator": iter(dataset),
        "ClusterSpec": cluster_resolver.ClusterSpec({"worker": ["localhost:1234"]}),
        "SimpleClusterResolver": cluster_resolver.SimpleClusterResolver(
            {"worker": ["localhost:1234"]}, task_type="worker", task_id=0
        ),
        "ConfigProto": contrib.ConfigProto(),
        "Compress": hooks.Compress(),
    }
