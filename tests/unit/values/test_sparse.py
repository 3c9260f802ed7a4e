import pytest
import torch
from torch import Tensor

from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.options import ReduceOp
from unisono.values import concatenate, is_sparse


def rows(indices: list[int], values: object, shape: tuple[int, ...] = (5, 2)) -> Tensor:
    """A sparse tensor with whole rows, as the gradient of an embedding."""
    kept = torch.tensor(values, dtype=torch.float32).reshape(len(indices), *shape[1:])
    return torch.sparse_coo_tensor(
        torch.tensor([indices], dtype=torch.int64), kept, shape, check_invariants=True
    )


def points(indices: list[list[int]], values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor(indices).t(), torch.tensor(values), (2, 3), check_invariants=True
    )


def test_sparse_coo_is_sparse_and_nothing_else() -> None:
    assert is_sparse(rows([1], [[1, 2]]))
    assert not is_sparse(torch.ones(2))


def test_a_sum_puts_rows_end_to_end_in_replica_order() -> None:
    total = concatenate(ReduceOp.SUM, [rows([1], [[1, 2]]), rows([3, 1], [[5, 6], [3, 4]])])

    assert total._indices().tolist() == [[1, 3, 1]]
    assert total._values().tolist() == [[1, 2], [5, 6], [3, 4]]
    assert not total.is_coalesced()
    assert total.to_dense().tolist() == [[0, 0], [4, 6], [0, 0], [5, 6], [0, 0]]


def test_a_mean_divides_the_values_by_the_number_of_replicas() -> None:
    mean = concatenate(ReduceOp.MEAN, [rows([1], [[1, 2]]), rows([1, 3], [[3, 4], [5, 6]])])

    assert mean._indices().tolist() == [[1, 1, 3]]
    assert mean._values().tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]


def test_a_mean_of_integers_is_a_float() -> None:
    whole = torch.tensor([1, 0], dtype=torch.int32).to_sparse()

    mean = concatenate(ReduceOp.MEAN, [whole, whole])

    assert mean.dtype == torch.float64
    assert mean._values().tolist() == [0.5, 0.5]


def test_every_dimension_may_be_sparse() -> None:
    total = concatenate(ReduceOp.SUM, [points([[0, 1]], [1.0]), points([[1, 2], [0, 1]], [2, 4])])

    assert total.to_dense().tolist() == [[0, 5, 0], [0, 0, 2]]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_replicas_without_a_row_add_nothing(num_replicas: int) -> None:
    total = concatenate(ReduceOp.SUM, [rows([], [])] * num_replicas)

    assert total.shape == (5, 2)
    assert total._nnz() == 0
    assert total.to_dense().count_nonzero() == 0


def test_a_replica_without_a_row_may_stand_among_others() -> None:
    total = concatenate(ReduceOp.SUM, [rows([2], [[1, 1]]), rows([], []), rows([2], [[4, 4]])])

    assert total._indices().tolist() == [[2, 2]]
    assert total.to_dense()[2].tolist() == [5, 5]


def test_duplicates_within_a_replica_are_kept() -> None:
    total = concatenate(ReduceOp.SUM, [rows([1, 1], [[1, 1], [2, 2]]), rows([1], [[4, 4]])])

    assert total._indices().tolist() == [[1, 1, 1]]
    assert total.to_dense()[1].tolist() == [7, 7]


def test_one_coalesced_replica_stays_coalesced_and_is_a_copy() -> None:
    tensor = rows([1], [[1, 2]]).coalesce()

    total = concatenate(ReduceOp.SUM, [tensor])
    total._values().fill_(9)

    assert total.is_coalesced()
    assert tensor.to_dense()[1].tolist() == [1, 2]


def test_one_replica_with_duplicates_is_not_taken_for_coalesced() -> None:
    total = concatenate(ReduceOp.SUM, [rows([1, 1], [[1, 2], [10, 20]])])

    assert not total.is_coalesced()
    assert total.to_dense()[1].tolist() == [11, 22]


def test_the_result_is_detached() -> None:
    tensor = rows([1], [[1, 2]]).requires_grad_()

    assert not concatenate(ReduceOp.SUM, [tensor, tensor]).requires_grad


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD])
def test_other_operations_are_refused_with_what_to_do(op: ReduceOp) -> None:
    with pytest.raises(UnsupportedError, match=rf"not {op}.*`.to_dense\(\)`"):
        concatenate(op, [rows([1], [[1, 2]])])


def test_other_numbers_of_sparse_dimensions_are_refused() -> None:
    dense = torch.ones(5, 2)

    with pytest.raises(ReplicaMismatchError, match=r"2 replicas, got \[1, 2\]"):
        concatenate(ReduceOp.SUM, [dense.to_sparse(1), dense.to_sparse(2)])
