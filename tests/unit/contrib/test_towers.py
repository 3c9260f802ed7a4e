import warnings
from typing import Any

import pytest
import torch

import unisono as uo
from unisono.contrib import CrossTowerOps, PerDevice
from unisono.errors import UnsupportedError
from unisono.experimental import CommunicationOptions
from unisono.reductions import Destinations, Result, mirrored

SUM, MEAN = uo.VariableAggregation.SUM, uo.VariableAggregation.MEAN


def older(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(uo.contrib, name)


each_ops = pytest.mark.parametrize(
    "make", [older("AllReduceCrossTowerOps"), older("ReductionToOneDeviceCrossTowerOps")]
)


def towers() -> PerDevice:
    return PerDevice({f"/cpu:{i}": torch.tensor(10.0**i) for i in range(3)})


def numbers(result: uo.Mirrored) -> list[Any]:
    assert type(result) is uo.Mirrored
    return [part.tolist() for part in result.values]


@pytest.mark.usefixtures("path", "memories")
@each_ops
def test_the_operation_is_an_aggregation(make: Any) -> None:
    ops = make()

    for _ in range(2):
        assert numbers(ops.reduce(SUM, towers(), ["/cpu:0", "/cpu:1"])) == [111, 111]
        assert numbers(ops.reduce(MEAN, towers(), "/cpu:0")) == [37]


@each_ops
def test_arguments_go_by_their_older_names(make: Any) -> None:
    ops = make()

    single = ops.reduce(aggregation=SUM, per_device_value=towers(), destinations="/cpu:0")
    (batched,) = ops.batch_reduce(aggregation=SUM, value_destination_pairs=[(towers(), "/cpu:0")])

    assert numbers(single) == numbers(batched) == [111]


@each_ops
@pytest.mark.parametrize(
    "wrong",
    [
        uo.ReduceOp.SUM,
        "sum",
        None,
        uo.VariableAggregation.NONE,
        uo.VariableAggregation.ONLY_FIRST_REPLICA,
    ],
)
def test_another_operation_is_refused_and_shown(make: Any, wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"must be VariableAggregation\.SUM or .*MEAN, got"):
        make().reduce(wrong, towers(), "/cpu:0")
    with pytest.raises(UnsupportedError, match="`aggregation`"):
        make().batch_reduce(wrong, [])


@each_ops
def test_a_broadcast_is_mirrored(make: Any) -> None:
    assert numbers(make().broadcast(7, "/cpu:0")) == [7]


def test_a_subclass_of_the_base_is_given_the_operation_of_today() -> None:
    class Own(CrossTowerOps):
        def reduce_implementation(
            self,
            reduce_op: uo.ReduceOp,
            per_replica_value: uo.DistributedValues,
            destinations: Destinations,
            options: CommunicationOptions,
        ) -> Result:
            assert reduce_op is uo.ReduceOp.MEAN
            mean = sum(per_replica_value.values) / len(per_replica_value.values)
            return mirrored(tuple(mean.clone() for _ in destinations.devices), destinations)

    assert numbers(Own().reduce(MEAN, towers(), ["/cpu:0", "/cpu:1"])) == [37, 37]
    assert numbers(Own().batch_reduce(MEAN, [(towers(), "/cpu:4")])[0]) == [37]


def test_the_base_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="must override"):
        CrossTowerOps().reduce(SUM, towers(), "/cpu:0")
