"""What all scheduled reductions have in common: groups of one batch, dense and sparse, routes."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import unisono as uo
from unisono.devices import cpu_slots
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.reductions import Ends
from unisono.testing import separate_memories

SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN
OPS = [uo.ReductionToOneDevice, uo.HierarchicalCopyAllReduce, uo.NcclAllReduce]

in_every_way = pytest.mark.usefixtures("path", "memories")
each_ops = pytest.mark.parametrize("make", OPS)


def per_replica(*values: Any) -> uo.PerReplica:
    return uo.PerReplica([torch.tensor(value) for value in values])


def numbers(result: Any) -> list[Any]:
    parts = result.values if isinstance(result, uo.Mirrored) else (result,)
    return [(part.to_dense() if part.is_sparse else part).tolist() for part in parts]


@in_every_way
@each_ops
def test_each_value_goes_to_its_own_destination_in_the_order_given(make: Any) -> None:
    ops, a, b = make(), per_replica(1.0, 10.0), per_replica(2.0, 20.0, 200.0)

    for _ in range(2):
        results = ops.batch_reduce(SUM, [(a, a), (b, "/cpu:0"), (a, "/cpu:5"), (b, b), (a, a)])

        assert list(map(numbers, results)) == [[11, 11], [222], [11], [222] * 3, [11, 11]]


@in_every_way
@each_ops
def test_dense_and_sparse_values_keep_their_places_in_a_batch(make: Any) -> None:
    dense, other = per_replica(1.0, 10.0), per_replica([2.0], [20.0])
    sparse = uo.PerReplica([torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()])

    results = make().batch_reduce(SUM, [(dense, dense), (sparse, sparse), (other, other)])

    assert list(map(numbers, results)) == [[11, 11], [[[2, 1], [1, 2]]] * 2, [[22], [22]]]
    assert results[1].values[0].is_sparse


@in_every_way
@each_ops
def test_sparse_rows_are_put_end_to_end(make: Any) -> None:
    first = torch.zeros(5, 2).index_add_(0, torch.tensor([1]), torch.tensor([[1.0, 2.0]]))
    second = torch.zeros(5, 2)
    second[[1, 3]] = torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    value = uo.PerReplica([first.to_sparse(1), second.to_sparse(1)])

    result = make().reduce(MEAN, value, "/cpu:1")

    assert result._indices().tolist() == [[1, 1, 3]]
    assert result._values().tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]


@in_every_way
@each_ops
def test_sparse_results_share_no_memory(make: Any) -> None:
    value = uo.PerReplica([torch.eye(2).to_sparse() for _ in range(3)])

    result = make().reduce(SUM, value, value)

    parts = (*value.values, *result.values)
    assert len({part._values().data_ptr() for part in parts}) == 6
    assert len({part._indices().data_ptr() for part in parts}) == 6


@in_every_way
@each_ops
def test_a_value_that_is_dense_here_and_sparse_there_becomes_dense(make: Any) -> None:
    value = uo.PerReplica([torch.eye(2).to_sparse(), torch.ones(2, 2)])

    result = make().reduce(SUM, value, value)

    assert not result.values[0].is_sparse
    assert numbers(result) == [[[2, 1], [1, 2]]] * 2


@in_every_way
@each_ops
def test_numbers_lists_and_arrays_may_be_components(make: Any) -> None:
    value = uo.PerReplica([[1.0, 2.0], np.array([10, 20], "float32"), torch.tensor([100.0, 200.0])])

    assert numbers(make().reduce(SUM, value, value)) == [[111, 222]] * 3


@in_every_way
@each_ops
@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (2, 1, 3)], ids=str)
def test_every_shape_is_kept(make: Any, shape: tuple[int, ...]) -> None:
    value = uo.PerReplica([torch.full(shape, 10.0**i) for i in range(3)])

    for _ in range(2):
        for part in make().reduce(SUM, value, value).values:
            assert part.equal(torch.full(shape, 111.0))


@in_every_way
@each_ops
def test_a_value_of_the_batch_that_does_not_go_together_is_named(make: Any) -> None:
    odd = uo.PerReplica([torch.ones(2), torch.ones(3)])
    good = per_replica(1.0, 10.0)

    with pytest.raises(ReplicaMismatchError, match=r"Value 2 of the batch .*replica 1 has \(3,\)"):
        make().batch_reduce(SUM, [(good, good), (good, "/cpu:0"), (odd, odd)])


@in_every_way
@each_ops
def test_what_cannot_be_added_is_refused(make: Any) -> None:
    value = per_replica(True, False)

    with pytest.raises(UnsupportedError, match=r"torch.bool"):
        make().reduce(SUM, value, value)


@in_every_way
@each_ops
def test_results_are_detached_plain_tensors(make: Any) -> None:
    leaves = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]

    result = make().reduce(SUM, uo.PerReplica(leaves), uo.PerReplica(leaves))

    assert [type(part) for part in result.values] == [Tensor] * 3
    assert not any(part.requires_grad for part in result.values)


@each_ops
def test_a_route_is_worked_out_once_for_each_machine(make: Any) -> None:
    ops, ends = make(), Ends(cpu_slots(3), cpu_slots(3))

    shared = ops.route(ends)
    with separate_memories():
        separate = ops.route(ends)

    assert ops.route(ends) is shared
    assert shared.plan.is_one_sum
    assert not separate.plan.is_one_sum


@each_ops
@pytest.mark.timeout(30)
@pytest.mark.usefixtures("memories")
def test_threads_can_share_an_operation(make: Any) -> None:
    ops = make()

    def reduce_often(thread_id: int) -> bool:
        value = per_replica(*(float(thread_id) * 10**i for i in range(3)))
        results = [ops.batch_reduce(SUM, [(value, value)] * 3) for _ in range(10)]
        return all(numbers(r) == [111 * thread_id] * 3 for batch in results for r in batch)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(reduce_often, range(1, 5)))
