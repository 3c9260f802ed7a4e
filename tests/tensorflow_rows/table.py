"""The table of checks, and what many of them use.

Each check is named by the section of its row and by how the first cell of the row begins.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as uo
from unisono import contrib

SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN
OLD_SUM, OLD_MEAN = uo.VariableAggregation.SUM, uo.VariableAggregation.MEAN
ON_READ = uo.VariableSynchronization.ON_READ
PAIR = ["cpu:0", "cpu:1"]

Check = Callable[[], None]
checks: dict[tuple[str, str], Check] = {}
made: list[uo.Strategy] = []


def row(section: str, start: str) -> Callable[[Check], Check]:
    def take(check: Check) -> Check:
        assert (section, start) not in checks
        checks[section, start] = check
        return check

    return take


def pair(num_replicas: int = 2, **settings: Any) -> Any:
    made.append(uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], **settings))
    return made[-1]


def kept(strategy: Any) -> Any:
    made.append(strategy)
    return strategy


def collective() -> Any:
    return kept(contrib.CollectiveAllReduceStrategy())


def pr(*values: Any, **options: Any) -> uo.PerReplica:
    return uo.PerReplica([torch.tensor(value, **options) for value in values])


def plain(value: Any) -> Any:
    if isinstance(value, uo.DistributedValues):
        return [plain(one) for one in value.values]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def is_mirrored(value: Any, *numbers: Any) -> bool:
    return type(value) is uo.Mirrored and plain(value) == list(numbers)


def names(thing: Any) -> list[str]:
    return [name for name in inspect.signature(thing).parameters if name != "self"]


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1.0)


def older(name: str) -> Any:
    with pytest.warns(DeprecationWarning, match="is an older name"):
        return getattr(contrib, name)


class Own(uo.CrossDeviceOps):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        assert all(isinstance(part, torch.Tensor) for part in per_replica_value.values)
        self.seen.append(f"reduce to {len(destinations.devices)}")
        copies = [sum(per_replica_value.values) + 100 for _ in destinations.devices]
        return copies[0] if len(copies) == 1 else uo.Mirrored(copies, destinations.devices)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        self.seen.append("broadcast")
        return super().broadcast_implementation(tensor, destinations)


def num_records(ops: uo.CrossDeviceOps) -> int:
    """How often the log speaks of two reductions with NCCL, of which there is none here."""
    records: list[Any] = []
    handler: Any = logging.Handler(logging.INFO)
    handler.emit = records.append
    logger = logging.getLogger("unisono")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for _ in range(2):
            assert plain(ops.reduce(SUM, pr(1, 2), pr(0, 0))) == [3, 3]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return len(records)
