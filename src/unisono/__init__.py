"""Synchronous data-parallel training for PyTorch, in the programming model of `tf.distribute`.

Importing the package loads almost nothing. A name is loaded with its package when it is first used.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono import (
        backend,
        cluster_resolver,
        contrib,
        errors,
        experimental,
        hooks,
        testing,
        tracing,
    )
    from unisono.contexts import (
        ReplicaContext,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from unisono.devices import Device
    from unisono.functions import function
    from unisono.input import (
        AutoShardPolicy,
        DistributedDataset,
        DistributedIterator,
        InputContext,
        InputOptions,
        InputReplicationMode,
        TensorSpec,
    )
    from unisono.modules import once
    from unisono.options import ReduceOp, VariableAggregation
    from unisono.reductions import (
        CrossDeviceOps,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReductionToOneDevice,
    )
    from unisono.strategies import (
        MirroredStrategy,
        OneDeviceStrategy,
        RunOptions,
        Strategy,
        StrategyExtended,
    )
    from unisono.values import DistributedValues, Mirrored, PerReplica
    from unisono.variables import Variable, VariableSynchronization
    from unisono.workers import MultiWorkerMirroredStrategy

__version__ = "0.1.0"

__all__ = [
    "AutoShardPolicy",
    "CrossDeviceOps",
    "Device",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "TensorSpec",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "backend",
    "cluster_resolver",
    "contrib",
    "errors",
    "experimental",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "hooks",
    "in_cross_replica_context",
    "once",
    "testing",
    "tracing",
]

# Where the names are that are no modules, the packages that load least first.
_HOMES = (
    "options",
    "devices",
    "values",
    "contexts",
    "reductions",
    "modules",
    "input",
    "strategies",
)
# The names of packages above the core, which a program on one host does not load.
_ABOVE = {
    "MultiWorkerMirroredStrategy": "workers",
    "Variable": "variables",
    "VariableSynchronization": "variables",
    "function": "functions",
}


def _load(name: str) -> Any:
    """Returns a public name, which Python asks for when it is not here yet."""
    if name in __all__:
        if importlib.util.find_spec(f"unisono.{name}") is not None:
            return importlib.import_module(f"unisono.{name}")
        for home in (_ABOVE[name],) if name in _ABOVE else _HOMES:
            module = importlib.import_module(f"unisono.{home}")
            if hasattr(module, name):
                if home in ("contexts", "modules", "variables"):
                    # They ask for the context of code that has entered none.
                    importlib.import_module("unisono.strategies")
                globals()[name] = found = getattr(module, name)
                return found
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")


if not TYPE_CHECKING:
    # A type checker that sees it takes every name to be there.
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("UNISONO_TRACE"):
    from unisono.tracing.recording import record_if_asked

    record_if_asked()
