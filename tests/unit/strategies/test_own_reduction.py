"""What a user's own reduction receives: the contract of `docs/your_own_reduction.md`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worker_threads import on_strategies

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]


class Recorder(uo.CrossDeviceOps):
    """Adds up, and writes down what it was given: the method, operation, values of each replica."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, uo.ReduceOp, list[list[float]]]] = []

    def reduce_implementation(
        self, reduce_op: uo.ReduceOp, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        self.calls.append(("reduce", reduce_op, [numbers(per_replica_value)]))
        return self._sum(reduce_op, per_replica_value, destinations)

    def batch_reduce_implementation(
        self, reduce_op: uo.ReduceOp, value_destination_pairs: Any, options: Any
    ) -> list[Any]:
        values = [numbers(value) for value, _ in value_destination_pairs]
        self.calls.append(("batch", reduce_op, values))
        return [self._sum(reduce_op, *pair) for pair in value_destination_pairs]

    def _sum(self, op: uo.ReduceOp, value: Any, destinations: Any) -> Any:
        total = torch.stack([part.to_dense() for part in value.values]).sum(0)
        if op is uo.ReduceOp.MEAN:
            total = total / len(value.values)
        return self.broadcast_implementation(total, destinations)


class RecordsAll(Recorder):
    def reduce_gradients_implementation(
        self, reduce_op: uo.ReduceOp, value_destination_pairs: Any, options: Any
    ) -> list[Any]:
        values = [numbers(value) for value, _ in value_destination_pairs]
        self.calls.append(("gradients", reduce_op, values))
        return [self._sum(reduce_op, *pair) for pair in value_destination_pairs]


def numbers(value: Any) -> list[float]:
    return [part.to_dense().sum().item() for part in value.values]


def backward(strategy: uo.Strategy, sizes: tuple[int, ...] = (1, 1)) -> list[float]:
    """Runs one backward pass, in which the gradients of replica i are i + 1, and 10 (i + 1)."""
    with strategy.scope():
        first, second = (nn.Linear(1, 1, bias=False) for _ in range(2))
    first_id = strategy.extended.first_replica_id

    def step(x: Tensor) -> None:
        (first(x).mean() + 10 * second(x).mean()).backward()

    own = range(first_id, first_id + len(strategy.extended.worker_devices))
    strategy.run(step, args=(uo.PerReplica([torch.full((sizes[i], 1), i + 1.0) for i in own]),))
    assert first.weight.grad is not None
    assert second.weight.grad is not None
    return [first.weight.grad.item(), second.weight.grad.item()]


MEAN, SUM = uo.ReduceOp.MEAN, uo.ReduceOp.SUM


def test_gradients_come_in_packs(mirrored: Make) -> None:
    ops = Recorder()

    assert backward(mirrored(2, cross_device_ops=ops)) == [1.5, 15]
    # In the reverse of the order in which the parameters were made.
    assert ops.calls == [("batch", MEAN, [[10, 20], [1, 2]])]


def test_all_gradients_come_at_once_if_asked_for(mirrored: Make) -> None:
    ops = RecordsAll()

    assert backward(mirrored(2, cross_device_ops=ops)) == [1.5, 15]
    assert ops.calls == [("gradients", MEAN, [[10, 20], [1, 2]])]


def test_a_single_replica_too(mirrored: Make) -> None:
    ops = RecordsAll()

    assert backward(mirrored(1, cross_device_ops=ops)) == [1, 10]
    assert ops.calls == [("gradients", MEAN, [[10], [1]])]


def test_gradients_of_uneven_batches_come_weighted(mirrored: Make) -> None:
    ops = RecordsAll()

    assert backward(mirrored(2, cross_device_ops=ops), (3, 1)) == [1.25, 12.5]
    assert ops.calls == [("gradients", MEAN, [[15, 10], [1.5, 1]])]


def test_other_reductions_are_no_gradients(mirrored: Make) -> None:
    ops = RecordsAll()
    strategy = mirrored(2, cross_device_ops=ops)

    def step() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return context.all_reduce("MEAN", torch.tensor(float(context.replica_id_in_sync_group)))

    strategy.run(step)
    strategy.reduce("SUM", uo.PerReplica([1.0, 2.0]))

    assert ops.calls == [("batch", MEAN, [[0, 1]]), ("reduce", SUM, [[1, 2]])]


@pytest.mark.parametrize("make_ops", [Recorder, RecordsAll])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_on_workers_it_combines_the_replicas_of_each(
    make_ops: Callable[[], Recorder], num_replicas: int
) -> None:
    made: list[Recorder] = []

    def make() -> Recorder:
        made.append(make_ops())
        return made[-1]

    ids = range(1, 2 * num_replicas + 1)
    mean = sum(ids) / len(ids)
    sizes = (1,) * len(ids)
    found = on_strategies(2, lambda s: backward(s, sizes), num_replicas=num_replicas, make_ops=make)

    assert found == [pytest.approx([mean, 10 * mean])] * 2
    for ops in made:
        assert {op for _, op, _ in ops.calls} <= {SUM}
        assert {len(value) for _, _, values in ops.calls for value in values} <= {num_replicas}
    is_asked = num_replicas > 1 or make_ops is RecordsAll
    assert all(bool(ops.calls) == is_asked for ops in made)


def test_a_function_that_accumulates_counts_on_workers_too() -> None:
    def highest(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors).amax(0)

    found = on_strategies(
        2,
        lambda strategy: backward(strategy, (1,) * 6),
        num_replicas=3,
        make_ops=lambda: uo.ReductionToOneDevice(accumulation_fn=highest),
    )

    assert found == [pytest.approx([(3 + 6) / 6, 10 * (3 + 6) / 6])] * 2
