"""Faults of TensorFlow that are not repeated here, one test for each."""

import logging
from typing import Any

import pytest
import torch
from tables import every

import unisono as uo
from unisono.cluster import Membership
from unisono.contrib import AllReduceCrossDeviceOps
from unisono.packing import SmallGroups, Spec

pytestmark = pytest.mark.usefixtures("path", "memories")

SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN
ALL_OPS = [uo.ReductionToOneDevice, uo.HierarchicalCopyAllReduce, uo.NcclAllReduce]

each_ops = pytest.mark.parametrize("make", ALL_OPS)


def per_replica(*values: Any, dtype: torch.dtype = torch.float32) -> uo.PerReplica:
    return uo.PerReplica([torch.tensor(value, dtype=dtype) for value in values])


def numbers(result: Any) -> list[Any]:
    return [part.tolist() for part in result.values]


@every("num_replicas", [3, 5, 7, 9])
@every("num_packs", [0, 1, 4])
def test_hierarchical_copy_drops_the_last_of_an_odd_number_of_replicas(
    num_replicas: int, num_packs: int
) -> None:
    value = per_replica(*(2.0**i for i in range(num_replicas)))
    ops = uo.HierarchicalCopyAllReduce(num_packs)

    for _ in range(2):
        assert numbers(ops.reduce(SUM, value, value)) == [2**num_replicas - 1] * num_replicas


def test_hierarchical_copy_divides_what_it_dropped_by_all() -> None:
    value = per_replica(1.0, 2.0, 6.0)

    # TensorFlow says (1 + 2) / 3 = 1.
    assert numbers(uo.HierarchicalCopyAllReduce().reduce(MEAN, value, value)) == [3, 3, 3]


@each_ops
def test_an_empty_batch_is_an_index_error(make: Any) -> None:
    assert make().batch_reduce(SUM, []) == []
    assert make().batch_reduce(MEAN, iter(())) == []


@each_ops
def test_two_int32_values_cannot_be_in_one_batch(make: Any) -> None:
    value = per_replica(1, 10, dtype=torch.int32)
    real = per_replica(2.0, 20.0)

    results = make().batch_reduce(SUM, [(value, value), (real, real), (value, value)])

    assert list(map(numbers, results)) == [[11, 11], [22, 22], [11, 11]]


@each_ops
def test_devices_in_another_order_trip_an_assertion(make: Any) -> None:
    value = uo.PerReplica([torch.tensor(1.0), torch.tensor(10.0)], devices=["/cpu:0", "/cpu:1"])
    swapped = uo.PerReplica([torch.tensor(2.0), torch.tensor(20.0)], devices=["/cpu:1", "/cpu:0"])

    results = make().batch_reduce(SUM, [(value, swapped), (swapped, value), (swapped, swapped)])

    assert list(map(numbers, results)) == [[11, 11], [22, 22], [22, 22]]
    assert [result.devices[0].index for result in results] == [1, 0, 1]


@pytest.mark.parametrize("max_group", [1, 2, 10])
def test_a_group_of_small_tensors_holds_two_more_than_the_limit(max_group: int) -> None:
    specs = [Spec(torch.Size((1,)), torch.float32)] * 30

    layout = SmallGroups(4, max_group).layout(specs)

    assert max(map(len, layout.packs)) == max_group


def test_values_come_back_in_the_order_of_their_size_class() -> None:
    values = [per_replica([i + 1.0] * n, [10.0] * n) for i, n in enumerate((1, 9, 2, 9, 1, 1))]
    ops = AllReduceCrossDeviceOps("hierarchical_copy", 0, 8, 10)

    results = ops.batch_reduce(SUM, [(value, value) for value in values])

    assert [result.values[1][0].item() for result in results] == [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("algorithm", ["garbage", "", "xring"])
def test_an_unknown_algorithm_is_taken_for_hierarchical_copy(algorithm: str) -> None:
    with pytest.raises(ValueError, match="'nccl' or 'hierarchical_copy'"):
        AllReduceCrossDeviceOps(algorithm)


@each_ops
@every("op", ["bogus", "average", None, uo.VariableAggregation.MEAN])
def test_an_unknown_operation_is_taken_for_a_sum(make: Any, op: Any) -> None:
    value = per_replica(1.0, 10.0)

    with pytest.raises(ValueError, match="reduce_op"):
        make().batch_reduce(op, [(value, value)])
    with pytest.raises(ValueError, match="reduce_op"):
        make().reduce(op, per_replica(7.0), "/cpu:0")


def test_nccl_without_a_gpu_is_a_crash(caplog: pytest.LogCaptureFixture) -> None:
    ops, value = uo.NcclAllReduce(), per_replica(1.0, 10.0)

    with caplog.at_level(logging.INFO, logger="unisono"):
        results = [ops.batch_reduce(SUM, [(value, value)])[0] for _ in range(3)]

    assert list(map(numbers, results)) == [[11, 11]] * 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize("num_packs", [0, 1, 2, 5])
def test_values_of_several_dtypes_cannot_be_packed(num_packs: int) -> None:
    single, double = per_replica(1.0, 10.0), per_replica(2.0, 20.0, dtype=torch.float64)
    ops = uo.HierarchicalCopyAllReduce(num_packs)

    results: Any = ops.batch_reduce(SUM, [(single, single), (double, double), (single, single)])

    assert list(map(numbers, results)) == [[11, 11], [22, 22], [11, 11]]
    assert results[1].values[0].dtype == torch.float64


@each_ops
def test_a_broadcast_of_a_per_replica_nests_it(make: Any) -> None:
    with pytest.raises(ValueError, match="Only one tensor can be broadcast, got a PerReplica of 2"):
        make().broadcast(per_replica(1.0, 10.0), "/cpu:0")


@each_ops
def test_a_failed_reduction_poisons_those_that_follow(make: Any) -> None:
    ops, value = make(), per_replica(1.0, 10.0)
    odd = uo.PerReplica([torch.ones(1), torch.ones(2)])

    with pytest.raises(ValueError, match="same shape"):
        ops.batch_reduce(SUM, [(value, value), (odd, odd)])

    assert numbers(ops.reduce(SUM, value, value)) == [11, 11]


def test_an_evaluator_outside_of_the_cluster_is_a_key_error() -> None:
    cluster = {"worker": ["host0:1", "host1:1"]}
    resolver = uo.cluster_resolver.SimpleClusterResolver(cluster, task_type="evaluator", task_id=0)

    assert Membership.of(resolver).size == 1


def test_a_negative_task_id_is_taken() -> None:
    cluster = {"worker": ["host0:1", "host1:1"]}

    with pytest.raises(uo.errors.ClusterError, match="numbered 0 to 1; this process is task -1"):
        uo.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=-1)
