"""A check for every row of the tables in `docs/coming_from_tensorflow.md`.

Each check is named by the section of its row and by how the first cell of the row begins.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import signal
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from worker_threads import on_strategies

import unisono as uo
from unisono import contrib
from unisono.errors import (
    BatchError,
    ContextError,
    DestinationError,
    DeviceError,
    EndOfInputError,
    ReplicaMismatchError,
    UnisonoError,
    UnsupportedError,
)
from unisono.testing import separate_memories

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


def context() -> uo.ReplicaContext:
    found = uo.get_replica_context()
    assert found is not None
    return found


def own_id() -> int:
    return context().replica_id_in_sync_group


def names(thing: Any) -> list[str]:
    return [name for name in inspect.signature(thing).parameters if name != "self"]


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1.0)


def older(name: str) -> Any:
    with pytest.warns(DeprecationWarning, match="is an older name"):
        return getattr(contrib, name)


OPS = "`tf.distribute.CrossDeviceOps` (2.4)"


@row(OPS, "`CrossDeviceOps()`")
def _() -> None:
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        uo.CrossDeviceOps().reduce(SUM, pr(1, 2), "cpu:0")


@row(OPS, "used by")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    strategy = pair(cross_device_ops=ops)
    assert isinstance(strategy, uo.Strategy)
    assert strategy.extended.cross_device_ops is ops


@row(OPS, "`tf.distribute.ReductionToOneDevice`")
def _() -> None:
    for kind in (uo.ReductionToOneDevice, uo.NcclAllReduce, uo.HierarchicalCopyAllReduce):
        assert kind().reduce(SUM, pr(1, 2), "cpu:0").item() == 3


@row(OPS, "`reduce(")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    assert names(ops.reduce) == ["reduce_op", "per_replica_value", "destinations", "options"]
    found = [ops.reduce(op, pr(2, 4), "cpu:0").item() for op in uo.ReduceOp]
    assert dict(zip(uo.ReduceOp.__members__, found, strict=True)) == {
        "SUM": 6, "MEAN": 3, "MIN": 2, "MAX": 4, "PROD": 8,
    }  # fmt: skip
    assert ops.reduce(SUM, np.float32(7), "cpu:0").item() == 7


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


@row(OPS, "`reduce_implementation(")
def _() -> None:
    assert pair(cross_device_ops=Own()).reduce("SUM", uo.PerReplica([1, 2])).item() == 103


@row(OPS, "`batch_reduce(")
def _() -> None:
    ops = uo.HierarchicalCopyAllReduce()
    assert ops.batch_reduce(SUM, []) == []
    mixed = [(pr(1, 2), "cpu:0"), (pr(1.5, 2.0), "cpu:1"), (pr(1, 2), pr(0, 0))]
    assert [plain(one) for one in ops.batch_reduce(SUM, mixed)] == [3, 3.5, [3, 3]]


@row(OPS, "`batch_reduce_implementation(")
def _() -> None:
    ops = Own()
    assert [r.item() for r in ops.batch_reduce(SUM, [(pr(1, 2), "cpu:0")] * 2)] == [103, 103]
    assert ops.seen == ["reduce to 1"] * 2


@row(OPS, "`broadcast(")
def _() -> None:
    assert plain(uo.CrossDeviceOps().broadcast(7, pr(0, 0))) == [7, 7]
    with pytest.raises(ReplicaMismatchError):
        uo.CrossDeviceOps().broadcast(pr(1, 2), "cpu:0")


@row(OPS, "`broadcast_implementation(")
def _() -> None:
    ops = Own()
    assert ops.broadcast(7, "cpu:0").tolist() == 7
    assert ops.seen == ["broadcast"]


@row(OPS, "`destinations`")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(0.0)
    ops, value = uo.ReductionToOneDevice(), pr(1.0, 2.0)
    for destinations in (value, variable):
        assert is_mirrored(ops.reduce(SUM, value, destinations), 3, 3)
    assert variable.item() == 0
    for one_device in (torch.ones(1), "/cpu:1"):
        assert ops.reduce(SUM, value, one_device).item() == 3
    with pytest.raises(DestinationError):
        ops.reduce(SUM, value, ["cpu:0"])


@row(OPS, "`options`")
def _() -> None:
    options = uo.experimental.CommunicationOptions(bytes_per_pack=4)
    assert options.bytes_per_pack == 4
    pairs = [(pr(1, 2), pr(0, 0))] * 3
    results = uo.HierarchicalCopyAllReduce().batch_reduce(SUM, pairs, options)
    assert [plain(one) for one in results] == [[3, 3]] * 3
    with pytest.raises(UnsupportedError, match="bytes_per_pack"):
        uo.experimental.CommunicationOptions(bytes_per_pack=-1)


@row(OPS, "returns a `tf.Tensor`")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    assert type(ops.reduce(SUM, pr(1, 2), "cpu:1")) is torch.Tensor
    assert is_mirrored(ops.reduce(SUM, pr(1, 2), pr(0, 0)), 3, 3)


@row(OPS, "`tf.distribute.StrategyExtended.reduce_to`")
def _() -> None:
    extended = pair().extended
    assert extended.reduce_to("SUM", pr(1, 2), "cpu:0").item() == 3
    assert plain(extended.batch_reduce_to("mean", [(pr(1.0, 2.0), pr(0, 0))])[0]) == [1.5, 1.5]


@row(OPS, "raises `ValueError`")
def _() -> None:
    for kind in (BatchError, DestinationError, ReplicaMismatchError, UnsupportedError):
        assert issubclass(kind, ValueError)
    ops = uo.ReductionToOneDevice()
    for call in (
        lambda: ops.batch_reduce(SUM, [[pr(1, 2), "cpu:0"]]),  # type: ignore[list-item]
        lambda: ops.reduce(SUM, pr(1, 2), None),
        lambda: ops.reduce(SUM, uo.PerReplica([torch.ones(1), torch.ones(2)]), "cpu:0"),
    ):
        with pytest.raises(ValueError, match=r"got|has") as caught:
            call()
        assert isinstance(caught.value, UnisonoError)


ONE = "`tf.distribute.ReductionToOneDevice` (2.4)"


@row(ONE, "`ReductionToOneDevice`")
def _() -> None:
    assert issubclass(uo.ReductionToOneDevice, uo.CrossDeviceOps)


@row(ONE, "`reduce_to_device=None`")
def _() -> None:
    assert names(uo.ReductionToOneDevice) == ["reduce_to_device", "accumulation_fn"]
    with separate_memories():
        assert uo.ReductionToOneDevice("cpu:1").reduce(SUM, pr(1, 2), "cpu:0").item() == 3


@row(ONE, "`accumulation_fn=None`")
def _() -> None:
    seen: list[Any] = []

    def first(parts: Any) -> Any:
        seen.extend(plain(part) for part in parts)
        return parts[0]

    ops = uo.ReductionToOneDevice(accumulation_fn=first)
    assert ops.reduce(SUM, pr(1, 2, 4), "cpu:0").item() == 1
    assert seen == [1, 2, 4]


@row(ONE, "`reduce`, `batch_reduce`, `broadcast`")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    assert ops.reduce(
        reduce_op=SUM, per_replica_value=pr(1, 2), destinations="cpu:0", options=None
    ).item() == 3  # fmt: skip
    pairs = [(pr(1, 2), "cpu:0")]
    found = ops.batch_reduce(reduce_op=SUM, value_destination_pairs=pairs, options=None)
    assert [one.item() for one in found] == [3]
    assert plain(ops.broadcast(tensor=7, destinations=pr(0, 0))) == [7, 7]


@row(ONE, "`tf.distribute.MirroredStrategy(")
def _() -> None:
    strategy = pair(cross_device_ops=uo.ReductionToOneDevice(accumulation_fn=lambda p: p[1]))
    assert strategy.reduce("SUM", pr(1, 2)).item() == 2


@row(ONE, "`tf.distribute.NcclAllReduce`")
def _() -> None:
    for kind in (uo.NcclAllReduce, uo.HierarchicalCopyAllReduce):
        assert inspect.signature(kind).parameters["num_packs"].default == 1
        value = pr(1, 2, 4)
        with separate_memories():
            assert plain(kind().batch_reduce(SUM, [(value, value)])[0]) == [7, 7, 7]


@row(ONE, "`StrategyExtended.reduce_to`")
def _() -> None:
    extended = pair(cross_device_ops=uo.ReductionToOneDevice()).extended
    assert is_mirrored(extended.reduce_to(SUM, pr(1, 2), pr(0, 0)), 3, 3)
    assert extended.batch_reduce_to(SUM, [(pr(1, 2), "cpu:1")])[0].item() == 3


ALL = "`tf.contrib.distribute.AllReduceCrossDeviceOps` (1.14)"


class Plus100(contrib.AllReduceCrossDeviceOps):
    def batch_reduce(self, reduce_op: Any, value_destination_pairs: Any) -> Any:  # type: ignore[override]
        results = super().batch_reduce(reduce_op, value_destination_pairs)
        return [uo.Mirrored([part + 100 for part in r.values], r.devices) for r in results]


@row(ALL, "`AllReduceCrossDeviceOps`")
def _() -> None:
    assert issubclass(contrib.AllReduceCrossDeviceOps, uo.CrossDeviceOps)
    strategy = pair(cross_device_ops=Plus100())
    assert plain(strategy.run(lambda: context().all_reduce("SUM", torch.tensor(1)))) == [102, 102]


@row(ALL, "`all_reduce_alg='nccl'`")
def _() -> None:
    for known in ("nccl", "hierarchical_copy"):
        contrib.AllReduceCrossDeviceOps(known)
    with pytest.raises(ValueError, match="'nccl' or 'hierarchical_copy'"):
        contrib.AllReduceCrossDeviceOps("ring")
    assert num_records(contrib.AllReduceCrossDeviceOps()) == 1


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


@row(ALL, "`num_packs=1`")
def _() -> None:
    with pytest.raises(UnsupportedError, match="-1"):
        contrib.AllReduceCrossDeviceOps(num_packs=-1)
    pairs = [(pr(1, 2), pr(0, 0)), (pr(1.5, 2.0), pr(0, 0))]
    found = contrib.AllReduceCrossDeviceOps("hierarchical_copy", 1).batch_reduce(SUM, pairs)
    assert [plain(one) for one in found] == [[3, 3], [3.5, 3.5]]


@row(ALL, "`agg_small_grads_max_bytes=0`")
def _() -> None:
    defaults = inspect.signature(contrib.AllReduceCrossDeviceOps).parameters
    assert defaults["agg_small_grads_max_bytes"].default == 0


@row(ALL, "`agg_small_grads_max_group=10`")
@row("TensorFlow bugs fixed here", "groups of small tensors")
def _() -> None:
    from unisono.packing import SmallGroups

    defaults = inspect.signature(contrib.AllReduceCrossDeviceOps).parameters
    assert defaults["agg_small_grads_max_group"].default == 10
    groups = SmallGroups(1000, 4)
    ops = contrib.AllReduceCrossDeviceOps("hierarchical_copy", 0, 1000, 4)
    assert groups.max_group == 4
    found = ops.batch_reduce(SUM, [(pr(1.0, 2.0), pr(0, 0))] * 9)
    assert [plain(one) for one in found] == [[3, 3]] * 9


@row(ALL, "`reduce(")
def _() -> None:
    ops = contrib.AllReduceCrossDeviceOps()
    assert names(ops.reduce)[-1] == "options"
    assert is_mirrored(ops.reduce(SUM, pr(1, 2), "cpu:0"), 3)


@row(ALL, "`batch_reduce(")
def _() -> None:
    ops = contrib.AllReduceCrossDeviceOps()
    assert names(ops.batch_reduce)[-1] == "options"
    assert is_mirrored(ops.batch_reduce(SUM, [(pr(1, 2), "cpu:0")])[0], 3)


@row(ALL, "`broadcast(")
def _() -> None:
    ops = contrib.AllReduceCrossDeviceOps()
    assert is_mirrored(ops.broadcast(7, "cpu:0"), 7)
    assert is_mirrored(ops.broadcast(7, PAIR), 7, 7)


@row(ALL, "`tf.distribute.ReduceOp.SUM`")
def _() -> None:
    ops = contrib.AllReduceCrossDeviceOps()
    assert is_mirrored(ops.reduce(SUM, pr(1.0, 2.0), "cpu:0"), 3)
    assert is_mirrored(ops.reduce(MEAN, pr(1.0, 2.0), "cpu:0"), 1.5)


@row(ALL, "`PerReplica`, `Mirrored`")
def _() -> None:
    assert uo.PerReplica([1]).values == uo.Mirrored([1]).values == (1,)


@row(ALL, "raises `ValueError`")
def _() -> None:
    ops = contrib.AllReduceCrossDeviceOps()
    with pytest.raises(BatchError):
        ops.batch_reduce(SUM, [[pr(1, 2), "cpu:0"]])  # type: ignore[list-item]
    assert issubclass(BatchError, ValueError)
    assert len(ops.batch_reduce(SUM, zip([pr(1, 2)], ["cpu:0"], strict=True))) == 1


TOWERS = "`tf.contrib.distribute.CrossTowerOps` (1.12)"


def tower_ops() -> Any:
    return older("ReductionToOneDeviceCrossTowerOps")()


class PublicTowers(contrib.CrossTowerOps):
    def reduce(  # type: ignore[override]
        self, aggregation: Any, per_device_value: Any, destinations: Any
    ) -> Any:
        return self.broadcast(sum(per_device_value.values), destinations)


class PrivateTowers(contrib.CrossTowerOps):
    def _reduce(self, aggregation: Any, per_device_value: Any, destinations: Any) -> Any:
        return self.broadcast(sum(per_device_value.values), destinations)


class ImplementedTowers(Own, contrib.CrossTowerOps):
    pass


@row(TOWERS, "`CrossTowerOps()`")
def _() -> None:
    contrib.CrossTowerOps()
    for ops, total in ((PublicTowers(), 3), (PrivateTowers(), 3), (ImplementedTowers(), 103)):
        strategy = pair(cross_device_ops=ops)
        assert strategy.reduce("SUM", pr(1, 2)).item() == total
        assert plain(strategy.extended.batch_reduce_to("SUM", [(pr(1, 2), "cpu:0")])) == [total]


@row(TOWERS, "`reduce(")
def _() -> None:
    assert is_mirrored(tower_ops().reduce(OLD_SUM, pr(1, 2), "cpu:0"), 3)
    assert names(contrib.CrossTowerOps.reduce)[0] == "aggregation"


@row(TOWERS, "`batch_reduce(")
def _() -> None:
    (found,) = tower_ops().batch_reduce(OLD_SUM, [(pr(1, 2), PAIR)])
    assert is_mirrored(found, 3, 3)


@row(TOWERS, "`broadcast(")
def _() -> None:
    assert is_mirrored(contrib.CrossTowerOps().broadcast(7, PAIR), 7, 7)


@row(TOWERS, "`tf.VariableAggregation.SUM`")
def _() -> None:
    assert is_mirrored(tower_ops().reduce(OLD_MEAN, pr(1.0, 2.0), "cpu:0"), 1.5)
    for wrong in (uo.VariableAggregation.NONE, uo.VariableAggregation.ONLY_FIRST_REPLICA):
        with pytest.raises(UnsupportedError, match="must be VariableAggregation"):
            tower_ops().reduce(wrong, pr(1, 2), "cpu:0")


@row(TOWERS, "`PerDevice`")
def _() -> None:
    value = contrib.PerDevice({"cpu:1": 1, "cpu:0": 2})
    assert isinstance(value, uo.PerReplica)
    assert value.values == (1, 2)


@row(TOWERS, "raises `ValueError`")
def _() -> None:
    assert is_mirrored(tower_ops().reduce(OLD_SUM, torch.tensor(5), "cpu:0"), 5)


COLLECTIVE = "`tf.contrib.distribute.CollectiveAllReduceStrategy` (1.13)"


@row(COLLECTIVE, "`CollectiveAllReduceStrategy`")
def _() -> None:
    assert isinstance(collective(), uo.Strategy)
    assert issubclass(contrib.CollectiveAllReduceStrategy, uo.MultiWorkerMirroredStrategy)


@row(COLLECTIVE, "`num_gpus_per_worker=0`")
def _() -> None:
    assert plain(collective().extended.worker_devices) == (uo.Device("cpu", 0),)
    with pytest.raises(DeviceError):
        contrib.CollectiveAllReduceStrategy(99)
    strategy = kept(contrib.CollectiveAllReduceStrategy(0, "ring"))
    assert strategy.extended.options.implementation.name == "RING"


@row(COLLECTIVE, "`extended`")
def _() -> None:
    assert isinstance(collective().extended, uo.StrategyExtended)


@row(COLLECTIVE, "`num_replicas_in_sync`")
def _() -> None:
    assert collective().num_replicas_in_sync == 1


@row(COLLECTIVE, "`__deepcopy__(memo)`")
def _() -> None:
    strategy = collective()
    assert kept(copy.deepcopy(strategy)).extended is not strategy.extended


@row(COLLECTIVE, "`configure(")
def _() -> None:
    strategy = collective()
    strategy.configure(None, {"worker": ["127.0.0.1:9"]}, "worker", 0)
    assert strategy.cluster_resolver.task_type == "worker"
    with strategy.scope():
        uo.Variable(1.0)
    with pytest.raises(UnisonoError, match="was called after something was made"):
        strategy.configure(None, {"worker": ["127.0.0.1:9"]}, "worker", 0)


@row(COLLECTIVE, "`experimental_initialize()`")
def _() -> None:
    assert collective().experimental_initialize() == []


@row(COLLECTIVE, "`experimental_finalize()`")
def _() -> None:
    assert collective().experimental_finalize() == []


@row(COLLECTIVE, "`experimental_run(")
def _() -> None:
    strategy = collective()
    iterator = strategy.make_dataset_iterator([torch.ones(2)])
    found = strategy.experimental_run(lambda x: {"sum": x.sum(), "text": "a"}, iterator)
    assert (found["sum"].item(), found["text"]) == (2, "a")
    assert strategy.run(lambda: 1) == 1


@row(COLLECTIVE, "it returns a `PerReplica`")
def _() -> None:
    strategy, same = pair(), torch.ones(1)
    assert type(strategy.experimental_run(lambda: torch.ones(1))) is uo.PerReplica
    assert strategy.experimental_run(lambda: same) is same
    assert type(collective().experimental_run(lambda: torch.ones(1))) is torch.Tensor
    assert strategy.experimental_local_results(5) == (5,)


@row(COLLECTIVE, "`make_dataset_iterator(dataset)`")
def _() -> None:
    loader = DataLoader(TensorDataset(torch.arange(3)), batch_size=3)
    (element,) = pair().make_dataset_iterator(loader).get_next()
    assert plain(element) == [[0, 1], [2]]


@row(COLLECTIVE, "`make_input_fn_iterator(")
def _() -> None:
    iterator = pair().make_input_fn_iterator(
        lambda _: [torch.zeros(1), torch.ones(1)], uo.InputReplicationMode.PER_WORKER
    )
    assert plain(iterator.get_next()) == [[0], [1]]


@row(COLLECTIVE, "`tf.distribute.InputIterator`")
def _() -> None:
    iterator = collective().make_dataset_iterator([torch.ones(2)])
    assert isinstance(iterator, uo.DistributedIterator)
    for _ in range(2):
        iterator.initialize()
        assert plain(iterator.get_next()) == [1, 1]
        with pytest.raises(EndOfInputError):
            iterator.get_next()


@row(COLLECTIVE, "`tf.distribute.InputContext`")
def _() -> None:
    seen: list[uo.InputContext] = []

    def input_fn(given: uo.InputContext) -> Any:
        seen.append(given)
        return [torch.ones(1)]

    collective().make_input_fn_iterator(input_fn)
    assert (seen[0].num_input_pipelines, seen[0].input_pipeline_id) == (1, 0)


@row(COLLECTIVE, "`reduce(reduce_op, value)`")
def _() -> None:
    strategy = pair()
    assert strategy.reduce(SUM, pr(1, 2)).item() == strategy.reduce("sum", pr(1, 2)).item() == 3
    assert strategy.reduce(SUM, pr([1, 2], [3, 4]), axis=0).item() == 10


@row(COLLECTIVE, "`scope()`")
def _() -> None:
    strategy = collective()
    with strategy.scope():
        assert uo.get_strategy() is strategy


@row(COLLECTIVE, "`update_config_proto(config_proto)`")
def _() -> None:
    config = contrib.ConfigProto(device_filters=["/job:worker/task:0"])
    changed = collective().update_config_proto(config)
    assert changed == config
    assert changed is not config


@row(COLLECTIVE, "`strategy.extended.call_for_each_replica(fn, args)`")
def _() -> None:
    strategy = pair()
    assert plain(strategy.extended.call_for_each_replica(lambda x: x + 1, (pr(1, 2),))) == [2, 3]
    iterator = strategy.make_input_fn_iterator(lambda _: [torch.ones(1, 1)] * 2)
    found = strategy.extended.call_for_each_replica(lambda row: row.sum(), iterator.get_next())
    assert plain(found) == [1, 1]


@row(COLLECTIVE, "`tf.distribute.get_replica_context()`")
@row("What is different", "`replica_id_in_sync_group` is a tensor")
def _() -> None:
    found = pair().run(own_id)
    assert found.values == (0, 1)
    assert type(found.values[0]) is int


@row(COLLECTIVE, "`tf.data.Dataset`")
def _() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=4)
    for dataset in (loader, [[torch.arange(4)]]):
        assert [plain(x) for (x,) in pair().experimental_distribute_dataset(dataset)] == [
            [[0, 1], [2, 3]]
        ]


OTHER = "Names of other versions"


@row(OTHER, "`tf.distribute.experimental.MultiWorkerMirroredStrategy(")
def _() -> None:
    kind = uo.experimental.MultiWorkerMirroredStrategy
    assert names(kind) == ["communication", "cluster_resolver"]
    with pytest.warns(DeprecationWarning, match="is an older"):
        assert isinstance(kept(kind()), uo.MultiWorkerMirroredStrategy)


@row(OTHER, "`tf.distribute.experimental.CollectiveCommunication`")
def _() -> None:
    experimental = uo.experimental
    assert experimental.CollectiveCommunication is experimental.CommunicationImplementation
    with pytest.warns(DeprecationWarning, match="is an older"):
        assert experimental.CollectiveHints(3) == experimental.CommunicationOptions(3)


@row(OTHER, "`tf.distribute.experimental.ValueContext`")
def _() -> None:
    seen: list[Any] = []
    pair().experimental_distribute_values_from_function(seen.append)
    assert seen == [uo.experimental.ValueContext(i, 2) for i in range(2)]


@row(OTHER, "`tf.distribute.RunOptions`")
def _() -> None:
    assert pair().run(lambda: 1, options=uo.RunOptions()) == 1


@row(OTHER, "`tf.Variable(")
def _() -> None:
    assert names(uo.Variable) == [
        "initial_value",
        "trainable",
        "validate_shape",
        "caching_device",
        "name",
        "variable_def",
        "dtype",
        "import_scope",
        "constraint",
        "synchronization",
        "aggregation",
        "shape",
    ]
    refused: tuple[tuple[str, Any], ...] = (
        ("validate_shape", False),
        ("caching_device", "cpu:0"),
        ("variable_def", 1),
        ("import_scope", "a"),
        ("constraint", abs),
    )
    for name, value in refused:
        with pytest.raises(UnsupportedError, match=name):
            uo.Variable(1.0, **{name: value})


@row(OTHER, "`variable.distribute_strategy`")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(1.0)
    assert variable.distribute_strategy is variable.strategy is strategy


@row(OTHER, "`dataset.element_spec`")
def _() -> None:
    dataset = pair().experimental_distribute_dataset([torch.ones(4, 3)])
    spec = uo.TensorSpec((None, 3), torch.float32)
    assert dataset.element_spec.values == iter(dataset).element_spec.values == (spec, spec)


@row(OTHER, "`tf.distribute.cluster_resolver.SlurmClusterResolver(")
def _() -> None:
    kind = uo.cluster_resolver.SlurmClusterResolver
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_NODELIST": "a",
    }
    assert names(kind)[:-1] == [
        "jobs",
        "port_base",
        "gpus_per_node",
        "gpus_per_task",
        "tasks_per_node",
        "auto_set_gpu",
        "rpc_layer",
    ]
    found = kind({"chief": 1}, 8888, 0, 0, 1, False, "grpc", environ=environ)
    assert found.master() == "grpc://a:8888"
    ports = [kind(environ=environ | {"SLURM_JOB_ID": job}).master() for job in "12"]
    assert ports[0] != ports[1]


@row(OTHER, "`tf.distribute.cluster_resolver.UnionResolver`")
def _() -> None:
    resolvers = uo.cluster_resolver
    assert resolvers.UnionResolver is resolvers.UnionClusterResolver
    one = resolvers.SimpleClusterResolver({"worker": ["a:1"]})
    other = resolvers.SimpleClusterResolver({"worker": ["b:1"]})
    assert resolvers.UnionResolver(one, other).cluster_spec().num_tasks("worker") == 2


@row(OTHER, "`tf.train.ClusterSpec(")
def _() -> None:
    spec = uo.cluster_resolver.ClusterSpec({"worker": {1: "host1:2222"}})
    assert spec.as_dict() == {"worker": {1: "host1:2222"}}
    resolver = uo.cluster_resolver.SimpleClusterResolver(spec)
    resolver.task_type, resolver.task_id = "worker", 1
    with pytest.raises(uo.errors.ClusterError, match="List every task"):
        uo.MultiWorkerMirroredStrategy(resolver)


@row(OTHER, "`tf.contrib.distribute.MirroredStrategy(")
def _() -> None:
    assert names(contrib.MirroredStrategy) == [
        "devices",
        "num_gpus",
        "num_gpus_per_worker",
        "cross_device_ops",
        "auto_shard_dataset",
        "cross_tower_ops",
    ]
    strategy = kept(contrib.MirroredStrategy(PAIR))
    batches = [torch.zeros(2), torch.ones(2)]
    assert plain(strategy.make_dataset_iterator(batches).get_next()) == [[0, 0], [1, 1]]


@row(OTHER, "`tf.contrib.distribute.OneDeviceStrategy`")
def _() -> None:
    assert older("OneDeviceStrategy") is uo.OneDeviceStrategy
    assert older("DistributionStrategy") is uo.Strategy
    assert older("DistributionStrategyExtended") is uo.StrategyExtended
    assert older("ReplicaContext") is uo.ReplicaContext


@row(OTHER, "`AllReduceCrossTowerOps`")
def _() -> None:
    value = pr(1, 2)
    for name in ("AllReduceCrossTowerOps", "ReductionToOneDeviceCrossTowerOps"):
        assert is_mirrored(older(name)().reduce(OLD_SUM, value, "cpu:0"), 3)
        assert pair(cross_device_ops=older(name)()).reduce("SUM", value).item() == 3
    device_ops = older("ReductionToOneDeviceCrossDeviceOps")()
    assert is_mirrored(device_ops.reduce(SUM, value, "cpu:0"), 3)
    assert issubclass(type(device_ops), older("CrossDeviceOps"))
    assert pair(cross_device_ops=device_ops).reduce("SUM", value).item() == 3


@row(OTHER, "`get_tower_context()`")
def _() -> None:
    get_tower_context, kind = older("get_tower_context"), older("TowerContext")

    def merge(strategy: uo.Strategy, value: Any, times: int) -> Any:
        return strategy.reduce("SUM", value) * times

    def step() -> Any:
        tower = get_tower_context()
        assert isinstance(tower, kind)
        own = torch.tensor(tower.tower_id)
        return tower.merge_call(merge, own, times=2)

    assert plain(pair().run(step)) == 2


@row(OTHER, "`get_cross_tower_context`")
def _() -> None:
    strategy = pair()
    outside = uo.get_replica_context()
    for name in ("get_cross_tower_context", "get_cross_replica_context"):
        assert older(name)() is None
        with strategy.scope():
            assert older(name)() is strategy
    for name in ("require_tower_context", "require_replica_context"):
        older(name)(outside)
        with strategy.scope(), pytest.raises(ContextError):
            older(name)(outside)
    with strategy.scope():
        assert older("get_distribution_strategy")() is strategy
        assert older("has_distribution_strategy")()


@row(OTHER, "`get_loss_reduction()`")
def _() -> None:
    with pair(reduce_gradients=SUM).scope():
        assert older("get_loss_reduction")() is SUM


@row(OTHER, "`Step`, `StandardInputStep`")
def _() -> None:
    for op, grad in ((MEAN, 1.5), (SUM, 3.0)):
        strategy = pair(reduce_gradients=op)
        with strategy.scope():
            variable = uo.Variable(0.0)
            optimizer = sgd([variable])

        def loss_fn(_: Any, x: Any, trained: Any = variable) -> Any:
            return (trained * x).sum()

        def batches() -> Any:
            return [torch.ones(1), 2 * torch.ones(1)]

        step = contrib.StandardSingleLossStep(batches, loss_fn, optimizer, strategy)
        assert isinstance(step, contrib.StandardInputStep)
        assert isinstance(step, contrib.Step)
        contrib.Monitor(step).run_steps()
        assert variable.item() == -grad


@row(OTHER, "`DistributeConfig`")
def _() -> None:
    strategy = pair()
    config = contrib.DistributeConfig(strategy, eval_distribute=strategy)
    assert tuple(config) == (strategy, strategy, None)


@row(OTHER, "`strategy.reduce(aggregation, value, destinations)`")
def _() -> None:
    with pytest.warns(DeprecationWarning, match="older form"):
        assert is_mirrored(pair().reduce(OLD_SUM, pr(1, 2), "cpu:0"), 3)


@row(OTHER, "`strategy.broadcast(")
def _() -> None:
    with pytest.warns(DeprecationWarning, match="is an older"):
        assert is_mirrored(pair().broadcast(torch.tensor(7)), 7, 7)


@row(OTHER, "`strategy.batch_reduce(")
def _() -> None:
    with pytest.warns(DeprecationWarning, match="is an older"):
        assert is_mirrored(pair().batch_reduce(OLD_SUM, [(pr(1, 2), ["cpu:0"])])[0], 3)


@row(OTHER, "`strategy.distribute_dataset(dataset_fn)`")
def _() -> None:
    with pytest.warns(DeprecationWarning, match="is an older"):
        dataset = pair().distribute_dataset(lambda: [torch.zeros(2), torch.ones(2)])
    assert plain(dataset.make_one_shot_iterator().get_next()) == [[0, 0], [1, 1]]


@row(OTHER, "`strategy.call_for_each_tower(")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(1.0, aggregation=OLD_MEAN)

    def older_name(name: str) -> Any:
        with pytest.warns(DeprecationWarning, match="is an older name"):
            return getattr(strategy, name)

    index = older_name("worker_device_index")
    call = older_name("call_for_each_tower")
    assert plain(call(lambda i, x: i + x, index, x=1)) == [1, 2]
    assert (older_name("num_towers"), older_name("is_single_tower")) == (2, False)
    older_name("update")(variable, lambda own, x: own.assign_add(x), 2.0)
    assert older_name("read_var")(variable).item() == 3
    older_name("update_non_slot")(older_name("worker_devices"), lambda: None)
    assert strategy.unwrap(5) == (5,)


@row(OTHER, "`experimental_run_v2`")
def _() -> None:
    with pytest.warns(DeprecationWarning, match=r"write `strategy\.run`"):
        assert pair().experimental_run_v2(lambda x: x, (1,)) == 1


@row(OTHER, "`tf.distribute.experimental.PreemptionCheckpointHandler(")
@row(OTHER, "`tf.distribute.experimental.TerminationConfig(")
@row(OTHER, "`tf.train.Checkpoint(")
def _() -> None:
    # A step in which the signal comes is finished and saved, and the next handler finds it.
    strategy = pair()
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    checkpoint = uo.experimental.Checkpoint(model=model)
    left: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        manager = uo.experimental.CheckpointManager(checkpoint, folder, max_to_keep=2)
        config = uo.experimental.TerminationConfig(
            termination_watcher_fn=signal.SIGUSR1, exit_fn=lambda: left.append("left")
        )
        handler = uo.experimental.PreemptionCheckpointHandler(
            strategy.cluster_resolver, manager, termination_config=config
        )

        def step() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

        handler.run(strategy.run, step)
        handler.close()
        assert left == ["left"]
        assert len(manager.checkpoints) == 1
        again = uo.experimental.PreemptionCheckpointHandler(
            strategy.cluster_resolver, checkpoint, folder
        )
        assert again.total_run_calls == 1
        again.close()


MISSING = "What is not available"


@row(MISSING, "`ParameterServerStrategy`")
def _() -> None:
    for name in (
        "ParameterServerStrategy",
        "TPUStrategy",
        "MultiWorkerAllReduce",
        "run_standard_tensorflow_server",
    ):
        with pytest.raises(UnsupportedError, match=r"[Uu]se `unisono|unisono launch"):
            getattr(contrib, name)()


def are_missing(thing: Any, *missing: str) -> None:
    for name in missing:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not hasattr(thing, name)


@row(MISSING, "`tf.distribute.ParameterServerStrategy`")
def _() -> None:
    are_missing(uo, "ParameterServerStrategy", "TPUStrategy", "Server", "coordinator")
    are_missing(uo.experimental, "CentralStorageStrategy")
    are_missing(uo.cluster_resolver, "TPUClusterResolver", "GCEClusterResolver")


@row(MISSING, "`strategy.group`")
def _() -> None:
    are_missing(pair(), "group", "map")


@row(MISSING, "`tf.distribute.experimental_set_strategy`")
def _() -> None:
    are_missing(uo, "experimental_set_strategy")


@row(MISSING, "`tf.contrib.distribute.UpdateContext`")
def _() -> None:
    are_missing(contrib, "UpdateContext", "initialize_tpu_system")


GENERAL = "In general"


class Exported:
    """Has `__dlpack__`, and nothing else."""

    def __dlpack__(self, **options: Any) -> Any:
        return torch.ones(1).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.ones(1).__dlpack_device__()


@row(GENERAL, "`tf.Tensor`")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    for given in (torch.ones(1), np.ones(1), 1, [1.0], Exported()):
        assert ops.reduce(SUM, given, "cpu:0").sum().item() == 1


@row(GENERAL, "`tf.IndexedSlices`")
def _() -> None:
    parts = [
        torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([float(i)]), (3,)) for i in (2, 3)
    ]
    total = pair().reduce("SUM", uo.PerReplica(parts))
    assert total._values().tolist() == [2, 3]
    assert not total.is_coalesced()


@row(GENERAL, "`/gpu:0`, `GPU:0`")
def _() -> None:
    from unisono.devices import resolve

    assert {str(resolve(name)) for name in ("/cpu:1", "CPU:1", "cpu:1")} == {"cpu:1"}
    of_task = resolve("/job:worker/task:1/device:CPU:1")
    assert str(of_task) == "/job:worker/task:1/device:cpu:1"
    for name in ("/gpu:99", "GPU:99", "/job:worker/task:1/device:GPU:99", "cuda:99"):
        with pytest.raises(DeviceError, match="cuda:99 on this host"):
            resolve(name)


@row(GENERAL, "logical CPU devices")
def _() -> None:
    assert pair(5).num_replicas_in_sync == 5


@row(GENERAL, "`PerReplica`, `Mirrored`")
def _() -> None:
    assert names(uo.PerReplica) == ["values", "devices"]


@row(GENERAL, "a `Mirrored` has a tensor's operators")
def _() -> None:
    mirrored, value = uo.Mirrored([torch.tensor(1), torch.tensor(2)]), pr(1, 2)
    assert (mirrored + 1).item() == 2
    with pytest.raises(UnsupportedError):
        value + 1
    with pytest.raises(UnsupportedError):
        torch.add(value, 1)  # type: ignore[call-overload]
    assert plain(pair().run(lambda: torch.add(mirrored, value))) == [2, 4]  # type: ignore[call-overload]


@row(GENERAL, "one destination gives a tensor")
def _() -> None:
    assert type(uo.ReductionToOneDevice().reduce(SUM, pr(1, 2), "cpu:0")) is torch.Tensor
    assert is_mirrored(contrib.AllReduceCrossDeviceOps().reduce(SUM, pr(1, 2), "cpu:0"), 3)


@row(GENERAL, "`tf.Variable` in a scope")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(1.0)
        optimizer = sgd([variable])

    def step() -> None:
        (variable * (1.0 + own_id())).backward()
        optimizer.step()

    strategy.run(step)
    assert variable.item() == -0.5


@row(GENERAL, "a variable made outside")
def _() -> None:
    variable, strategy = uo.Variable(1.0), pair()
    with strategy.scope():
        variable.assign_add(1.0)
    assert variable.item() == 2
    with pytest.raises(ContextError):
        strategy.run(lambda: variable.assign_add(1.0))


@row(GENERAL, "`strategy.run` in a `merge_call`")
def _() -> None:
    def merge(strategy: uo.Strategy, value: Any) -> Any:
        return strategy.run(lambda own: own + own_id(), (value,))

    found = pair().run(lambda: context().merge_call(merge, (torch.tensor(10 * own_id()),)))
    assert plain(found) == [0, 11]


@row(GENERAL, "`ReduceOp.SUM`, `MEAN`")
def _() -> None:
    assert list(uo.ReduceOp.__members__) == ["SUM", "MEAN", "MIN", "MAX", "PROD"]


@row(GENERAL, "a mean of int32")
def _() -> None:
    for dtype, result in ((torch.int32, torch.float64), (torch.int8, torch.float32)):
        mean = pair().reduce("MEAN", pr(1, 2, dtype=dtype))
        assert (mean.item(), mean.dtype) == (1.5, result)


@row(GENERAL, "an element of an iterator")
def _() -> None:
    batches = [torch.ones(2)]
    kinds = [type(next(iter(pair(n).experimental_distribute_dataset(batches)))) for n in (1, 2)]
    assert kinds == [torch.Tensor, uo.PerReplica]
    assert on_strategies(
        2, lambda s: type(iter(s.experimental_distribute_dataset(batches)).get_next())
    ) == [uo.PerReplica] * 2  # fmt: skip


@row(GENERAL, "`experimental_distribute_values_from_function`")
def _() -> None:
    found = pair().experimental_distribute_values_from_function(lambda _: (1, {"a": [2]}))
    assert (found[0].values, found[1]["a"][0].values) == ((1, 1), (2, 2))


BUGS = "TensorFlow bugs fixed here"


@row(BUGS, "the hierarchical copy drops")
def _() -> None:
    value = pr(1, 2, 4)
    with separate_memories():
        assert is_mirrored(uo.HierarchicalCopyAllReduce().reduce(SUM, value, value), 7, 7, 7)


@row(BUGS, "an empty batch")
def _() -> None:
    assert uo.HierarchicalCopyAllReduce().batch_reduce(SUM, []) == []
    assert pair().extended.batch_reduce_to("SUM", []) == []


@row(BUGS, "values of two dtypes")
def _() -> None:
    pairs = [(pr(1, 2), pr(0, 0)), (pr(1.5, 2.0), pr(0, 0))]
    found: Any = uo.HierarchicalCopyAllReduce(num_packs=1).batch_reduce(SUM, pairs)
    assert [one.values[0].dtype for one in found] == [torch.int64, torch.float32]


@row(BUGS, "devices in another order")
def _() -> None:
    other = uo.PerReplica([0, 0], ["cpu:1", "cpu:0"])
    found: Any = uo.HierarchicalCopyAllReduce().batch_reduce(SUM, [(pr(1, 2), other)])[0]
    assert found.devices == other.devices


@row(BUGS, "an unknown `all_reduce_alg`")
def _() -> None:
    with pytest.raises(ValueError, match="'nccl' or 'hierarchical_copy'"):
        contrib.AllReduceCrossDeviceOps("x")
    with pytest.raises(ValueError, match=r"ReduceOp\.SUM, ReduceOp\.MEAN"):
        uo.HierarchicalCopyAllReduce().reduce("x", pr(1, 2), "cpu:0")


@row(BUGS, "NCCL without GPUs")
def _() -> None:
    assert num_records(uo.NcclAllReduce()) == 1


@row(BUGS, "an absent GPU")
def _() -> None:
    with pytest.raises(ValueError, match="no cuda:99 on this host"):
        uo.ReductionToOneDevice().reduce(SUM, pr(1, 2), "/gpu:99")


@row(BUGS, "a mean of integers")
def _() -> None:
    for num_replicas in (1, 2):
        value = pr(*[3] * num_replicas)
        assert pair(num_replicas).reduce("MEAN", value).dtype == torch.float64


@row(BUGS, "broadcasting a `PerReplica`")
def _() -> None:
    with pytest.raises(ValueError, match="Only one tensor can be broadcast"):
        uo.ReductionToOneDevice().broadcast(pr(1, 2), "cpu:0")


@row(BUGS, "sums depend on the algorithm")
def _() -> None:
    torch.manual_seed(0)
    value = uo.PerReplica([torch.randn(1000) for _ in range(5)])
    kinds = (uo.ReductionToOneDevice(), *(uo.HierarchicalCopyAllReduce(n) for n in (0, 1, 3)))
    results: list[Any] = [ops.batch_reduce(SUM, [(value, value)])[0] for ops in kinds]
    found = [result.values[0] for result in results]
    assert all(torch.equal(found[0], other) for other in found)


@row(BUGS, "two int32 values")
def _() -> None:
    def step() -> Any:
        one = torch.tensor(1, dtype=torch.int32)
        return context().all_reduce("SUM", [one, one, one * 1.5])

    assert [plain(part) for part in pair().run(step)] == [[2, 2], [2, 2], [3, 3]]


def on_read(value: Any, aggregation: Any, strategy: uo.Strategy) -> uo.Variable:
    with strategy.scope():
        return uo.Variable(value, synchronization=ON_READ, aggregation=aggregation)


@row(BUGS, "an ON_READ sum of 2 replicas")
def _() -> None:
    variable = on_read(0, OLD_SUM, pair())
    with pytest.raises(ValueError, match=r"use `load\(\)`"):
        variable.assign(7)
    variable.load(7)
    assert [plain(part) for part in variable.values] == [4, 3]


@row(BUGS, "a reduction of Python's `0`")
def _() -> None:
    assert pair().extended.reduce_to("SUM", 0, "cpu:0").item() == 0


@row(BUGS, "a list as `axis`")
def _() -> None:
    assert pair().reduce("SUM", pr([[1, 2]], [[3, 4]]), axis=[0, 1]).item() == 10


@row(BUGS, "a negative `axis` of `gather`")
def _() -> None:
    assert pair().gather(pr([[1, 2]], [[3, 4]]), axis=-1).tolist() == [[1, 2, 3, 4]]


@row(BUGS, "a gather of unequal shapes")
def _() -> None:
    strategy = pair()
    with pytest.raises(ValueError, match="replica 1 has"):
        strategy.gather(uo.PerReplica([torch.ones(2, 2), torch.ones(2, 3)]), axis=0)
    assert strategy.gather(pr([1], [2]), axis=0).tolist() == [1, 2]


@row(BUGS, "assigning a `PerReplica`")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(0.0)
        with pytest.raises(ValueError, match="one value for all replicas"):
            variable.assign(pr(1.0, 2.0))


@row(BUGS, "without aggregation, an ON_READ")
def _() -> None:
    variable = on_read(0.0, uo.VariableAggregation.NONE, pair())
    with pytest.raises(ValueError, match="nothing was written"):
        variable.assign(1.0)
    assert [plain(part.detach()) for part in variable.values] == [0, 0]


DIFFERENT = "What is different"


@row(DIFFERENT, "replicas run one after another")
def _() -> None:
    import threading

    barrier = threading.Barrier(2, timeout=10)
    pair().run(barrier.wait)
    order: list[int] = []

    def step() -> None:
        order.extend([own_id()] * 3)

    pair(serial=True).run(step)
    assert order == [0] * 3 + [1] * 3


@row(DIFFERENT, "an error on replica 0")
def _() -> None:
    ended: list[int] = []

    def step() -> None:
        if own_id() == 0:
            raise LookupError
        for _ in range(10**9):
            pass
        ended.append(own_id())

    with pytest.raises(LookupError):
        pair().run(step)
    assert ended == []


@row(DIFFERENT, "another structure on one replica")
def _() -> None:
    strategy = pair()
    with pytest.raises(ValueError, match="Replica 1 returned"):
        strategy.run(lambda: [1] * own_id())
    with pytest.raises(ValueError, match="its sum over replicas has no meaning"):
        strategy.reduce("SUM", uo.Mirrored([torch.ones(1)] * 2))
    with pytest.raises(ValueError, match="has none for replica 1"):
        strategy.run(lambda x: x, (pr(1),))


@row(DIFFERENT, "`reduce` to the current device")
def _() -> None:
    strategy = kept(uo.MirroredStrategy(["cpu:1", "cpu:0"]))
    assert strategy.extended.host == uo.Device("cpu", 1)
    assert strategy.reduce("SUM", pr(1, 2)).item() == 3


@row(DIFFERENT, "`run` makes a variable")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(1.0)
    found = strategy.run(lambda: variable.values[own_id()])
    assert type(found) is uo.PerReplica
    assert strategy.extended.value_container(found.values[1]) is variable


@row(DIFFERENT, "components of a variable have names")
def _() -> None:
    assert uo.Variable(1.0, name="z").name == "z"


@row(DIFFERENT, "an optimizer updates each component")
def _() -> None:
    strategy, steps = pair(), []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            return super().step(closure)

    with strategy.scope():
        variable = uo.Variable(1.0)
        parameters: Any = [variable]
        optimizer = Counted(parameters, lr=1.0)

    def step() -> None:
        (variable * 1.0).backward()
        optimizer.step()

    strategy.run(step)
    assert [plain(part.detach()) for part in variable.values] == [0, 0]
    assert len(steps) == 1


@row(DIFFERENT, "worker devices of the default strategy")
def _() -> None:
    default = uo.get_strategy()
    assert default.extended.worker_devices == (uo.Device("cpu", 0),)
    assert copy.deepcopy(default) is not default


@row(DIFFERENT, "a `PerReplica` of `tf.IndexedSlices`")
def _() -> None:
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match=r"Call `\.to_dense\(\)` first"):
        pair().gather(uo.PerReplica([sparse, sparse]), axis=0)


def read(num_replicas: int, source: Callable[[], Any], **options: Any) -> list[Any]:
    """What each of two workers gets of `source`, step by step."""

    def elements(strategy: uo.Strategy) -> Any:
        given = uo.InputOptions(**options)
        dataset = strategy.experimental_distribute_dataset(source(), given)
        return [plain(x) for (x,) in dataset]

    return on_strategies(2, elements, num_replicas=num_replicas)


def loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **options)


def counts(num_samples: int, **options: Any) -> Any:
    given = [torch.ones(num_samples)]
    (x,) = pair(3).experimental_distribute_dataset(given, uo.InputOptions(**options))
    return x.counts, [len(part) for part in x.values]


@row(DIFFERENT, "4 samples over 3 replicas")
def _() -> None:
    assert counts(4) == ((2, 1, 1), [2, 1, 1])
    assert counts(4, split="tensorflow") == ((2, 2, 0), [2, 2, 0])


@row(DIFFERENT, "a replica without samples")
def _() -> None:
    assert counts(2) == ((1, 1, 0), [1, 1, 1])
    assert counts(2, split="tensorflow") == ((1, 1, 0), [1, 1, 0])


@row(DIFFERENT, '`strategy.reduce("MEAN", losses)`')
def _() -> None:
    for size, split, mean in ((4, "even", 1.5), (2, "even", 0.5), (4, "tensorflow", 1.5)):
        strategy = pair(3)
        batch, options = torch.arange(float(size)), uo.InputOptions(split=split)
        (x,) = strategy.experimental_distribute_dataset([batch], options)
        assert strategy.reduce("MEAN", strategy.run(torch.mean, args=(x,))).item() == mean


@row(DIFFERENT, "`dataset.with_options`")
@row(DIFFERENT, "FILE shares the files that a pipeline reads")
def _() -> None:
    files: Any = ConcatDataset([TensorDataset(torch.arange(2) + 10 * i) for i in range(2)])
    policy = uo.AutoShardPolicy.FILE
    found = read(1, lambda: loader(files, batch_size=2), auto_shard_policy=policy)
    assert found == [[[[0]], [[1]]], [[[10]], [[11]]]]
    by_default = read(1, lambda: loader(files, batch_size=2))
    assert by_default == [[[[0]], [[10]]], [[[1]], [[11]]]]


@row(DIFFERENT, "with DATA worker 0 of 2")
def _() -> None:
    dataset = TensorDataset(torch.arange(4))
    policy = uo.AutoShardPolicy.DATA
    found = read(2, lambda: loader(dataset, batch_size=4), auto_shard_policy=policy)
    assert found == [[[[0], [1]]], [[[2], [3]]]]


@row(DIFFERENT, "with DATA each worker shuffles")
def _() -> None:
    dataset = TensorDataset(torch.arange(8))
    seeds = iter(range(10))

    def shuffled() -> Any:
        generator = torch.Generator().manual_seed(next(seeds))
        return loader(dataset, batch_size=4, shuffle=True, generator=generator)

    found = read(1, shuffled)
    samples = [x for worker in found for step in worker for part in step for x in part]
    assert sorted(samples) == list(range(8))


@row(DIFFERENT, "`session_config` of a strategy")
def _() -> None:
    strategy = pair()
    strategy.configure(session_config={"a": 1})
    assert len(strategy.experimental_make_numpy_dataset(np.arange(3), session="s")) == 3
