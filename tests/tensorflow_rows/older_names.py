"""Rows of `tf.contrib.distribute`."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from on_replica import replica as context
from on_replica import replica_id as own_id
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from tensorflow_rows.table import (
    MEAN,
    OLD_MEAN,
    OLD_SUM,
    PAIR,
    SUM,
    Own,
    collective,
    is_mirrored,
    kept,
    names,
    num_records,
    older,
    pair,
    plain,
    pr,
    row,
)
from unisono import contrib
from unisono.errors import (
    BatchError,
    DeviceError,
    EndOfInputError,
    UnisonoError,
    UnsupportedError,
)

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
    # As on the page: one replica, so `get_next()` gives a tensor.
    alone = collective()
    iterator = alone.make_input_fn_iterator(lambda _: [torch.ones(1, 1)])
    found = alone.extended.call_for_each_replica(lambda row: row.sum(), iterator.get_next())
    assert found.item() == 1


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
