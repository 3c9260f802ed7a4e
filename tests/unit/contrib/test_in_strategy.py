"""Operations of `tf.contrib.distribute` in a strategy: every class works, and overrides count."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uo
from unisono.contrib import AllReduceCrossDeviceOps, CrossTowerOps, PerDevice
from unisono.errors import ReplicaMismatchError, UnsupportedError

SUM, MEAN = uo.VariableAggregation.SUM, uo.VariableAggregation.MEAN
Make = Callable[..., uo.MirroredStrategy]


def older(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(uo.contrib, name)


AllReduceCrossTowerOps: Any = older("AllReduceCrossTowerOps")
ReductionToOneDeviceCrossTowerOps: Any = older("ReductionToOneDeviceCrossTowerOps")
ContribCrossDeviceOps: Any = older("CrossDeviceOps")


def trained(strategy: uo.Strategy) -> list[Any]:
    """Makes three steps, of which each replica has its own sample, and returns the weights."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(sample: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(sample).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step, (uo.PerReplica([torch.ones(1, 2).double(), -torch.eye(2).double()]),))
    return [parameter.tolist() for parameter in model.parameters()]


def used(strategy: uo.Strategy) -> Any:
    """Reduces in all ways that a strategy offers to two replicas with 1 and 2."""
    value = uo.PerReplica([torch.tensor(1.0), torch.tensor(2.0)])

    def step(own: Any) -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", own)

    total = strategy.reduce("SUM", value)
    batched = strategy.extended.batch_reduce_to("MEAN", [(value, value), (value, "cpu:1")])
    copies = strategy.extended.broadcast_to(torch.tensor(7.0), value)
    assert type(total) is torch.Tensor
    return (
        total.item(),
        [part.item() for part in strategy.run(step, (value,)).values],
        [part.item() for part in batched[0].values],
        batched[1].item(),
        [part.item() for part in copies.values],
    )


@pytest.mark.parametrize(
    "make",
    [
        AllReduceCrossDeviceOps,
        lambda: AllReduceCrossDeviceOps("hierarchical_copy", num_packs=2),
        older("ReductionToOneDeviceCrossDeviceOps"),
        AllReduceCrossTowerOps,
        lambda: AllReduceCrossTowerOps("hierarchical_copy", 0, 100, 2),
        ReductionToOneDeviceCrossTowerOps,
    ],
)
@pytest.mark.usefixtures("memories")
def test_every_class_works_in_a_strategy(mirrored: Make, make: Any) -> None:
    strategy = mirrored(2, cross_device_ops=make())

    for _ in range(2):
        assert used(strategy) == (3, [3, 3], [1.5, 1.5], 1.5, [7, 7])
    assert trained(strategy) == trained(mirrored())


class PublicMethods(CrossTowerOps):
    """Overrides what the page of 1.12 names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def reduce(  # type: ignore[override]
        self, aggregation: Any, per_device_value: Any, destinations: Any
    ) -> uo.Mirrored:
        assert isinstance(aggregation, uo.VariableAggregation)
        assert isinstance(per_device_value, PerDevice)
        self.calls.append("reduce")
        return self.broadcast(100 + sum(per_device_value.values), destinations)

    def batch_reduce(  # type: ignore[override]
        self, aggregation: Any, value_destination_pairs: Any
    ) -> list[uo.Mirrored]:
        self.calls.append("batch_reduce")
        return [self.reduce(aggregation, value, to) for value, to in value_destination_pairs]

    def broadcast(self, tensor: Any, destinations: Any) -> uo.Mirrored:
        self.calls.append("broadcast")
        return super().broadcast(tensor + 1, destinations)


class PrivateMethods(CrossTowerOps):
    """Overrides what did the work in 1.12."""

    def _reduce(self, aggregation: Any, per_device_value: Any, destinations: Any) -> Any:
        assert aggregation in (SUM, MEAN)
        total = sum(per_device_value.get(device) for device in per_device_value.devices)
        return self.broadcast(100 + total, destinations)

    def _batch_reduce(self, aggregation: Any, value_destination_pairs: Any) -> Any:
        return [self._reduce(aggregation, value, to) for value, to in value_destination_pairs]

    def _broadcast(self, tensor: Any, destinations: Any) -> Any:
        copies = [tensor + 1 for _ in destinations]
        return uo.Mirrored(copies, destinations)


@pytest.mark.parametrize("make", [PublicMethods, PrivateMethods])
def test_a_subclass_that_overrides_the_methods_of_1_12_is_obeyed(mirrored: Make, make: Any) -> None:
    strategy = mirrored(2, cross_device_ops=make())

    assert used(strategy) == (104, [104, 104], [104, 104], 104, [8, 8])


def test_gradients_are_reduced_by_what_a_subclass_overrides(mirrored: Make) -> None:
    ops = PublicMethods()
    strategy = mirrored(2, cross_device_ops=ops)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)

    def step() -> None:
        model(torch.ones(1, 1)).backward()

    strategy.run(step)

    assert "batch_reduce" in ops.calls
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 103


class OnlyReduce(AllReduceCrossTowerOps):  # type: ignore[misc]
    def reduce(self, aggregation: Any, per_device_value: Any, destinations: Any) -> Any:
        total = super().reduce(aggregation, per_device_value, destinations)
        return uo.Mirrored([part + 100 for part in total.values], total.devices)


class OnlyPrivateReduce(CrossTowerOps):
    def _reduce(self, aggregation: Any, per_device_value: Any, destinations: Any) -> Any:
        total = sum(per_device_value.values) / (2 if aggregation is MEAN else 1)
        return self.broadcast(100 + total, destinations)


class OnlyReduceOf14(AllReduceCrossDeviceOps):
    """The page of 1.14 knows no options."""

    def reduce(self, reduce_op: Any, per_replica_value: Any, destinations: Any) -> Any:  # type: ignore[override]
        total = super().reduce(reduce_op, per_replica_value, destinations)
        return uo.Mirrored([part + 100 for part in total.values], total.devices)


class OnlyReduceOfTheBase(ContribCrossDeviceOps):  # type: ignore[misc]
    def reduce(self, reduce_op: Any, per_replica_value: Any, destinations: Any) -> Any:
        total = sum(per_replica_value.values) / (2 if reduce_op is uo.ReduceOp.MEAN else 1)
        return self.broadcast(100 + total, destinations)


@pytest.mark.parametrize(
    "make", [OnlyReduce, OnlyPrivateReduce, OnlyReduceOf14, OnlyReduceOfTheBase]
)
def test_without_a_method_for_batches_each_value_is_reduced_by_itself(
    mirrored: Make, make: Any
) -> None:
    strategy = mirrored(2, cross_device_ops=make())

    assert used(strategy) == (103, [103, 103], [101.5, 101.5], 101.5, [7, 7])


class OnlyImplementation(AllReduceCrossTowerOps):  # type: ignore[misc]
    def reduce_implementation(self, reduce_op: Any, *arguments: Any) -> Any:
        assert isinstance(reduce_op, uo.ReduceOp)
        return super().reduce_implementation(reduce_op, *arguments)


def test_an_implementation_in_towers_is_given_the_operation_of_today(mirrored: Make) -> None:
    strategy = mirrored(2, cross_device_ops=OnlyImplementation())

    assert used(strategy) == (3, [3, 3], [1.5, 1.5], 1.5, [7, 7])


def test_a_batch_of_towers_is_reduced_value_by_value() -> None:
    (total,) = OnlyPrivateReduce().batch_reduce(SUM, [(PerDevice({"cpu:0": 1.0}), "cpu:1")])

    assert total.values[0].item() == 101


class WrongResults(CrossTowerOps):
    def reduce(  # type: ignore[override]
        self, aggregation: Any, per_device_value: Any, destinations: Any
    ) -> Any:
        return None

    def batch_reduce(  # type: ignore[override]
        self, aggregation: Any, value_destination_pairs: Any
    ) -> Any:
        return []


def test_a_wrong_result_of_a_subclass_is_shown(mirrored: Make) -> None:
    strategy = mirrored(2, cross_device_ops=WrongResults())
    value = uo.PerReplica([torch.ones(1)] * 2)

    with pytest.raises(ReplicaMismatchError, match=r"WrongResults\.reduce\(\).*got None"):
        strategy.reduce("SUM", value)
    with pytest.raises(ReplicaMismatchError, match="returned 0 results for 1 values"):
        strategy.extended.batch_reduce_to("SUM", [(value, value)])


def test_towers_know_sums_and_means_alone(mirrored: Make) -> None:
    strategy = mirrored(2, cross_device_ops=PublicMethods())

    with pytest.raises(UnsupportedError, match=r"not ReduceOp\.MAX"):
        strategy.reduce("MAX", uo.PerReplica([torch.ones(1)] * 2))
