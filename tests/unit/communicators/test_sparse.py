"""Sparse gradients between ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from thread_ranks import make_threads
from torch import Tensor

from unisono.communicators.communicator import Communicator
from unisono.communicators.sparse import all_reduce_sparse
from unisono.errors import UnequalCollectivesError, UnsupportedError
from unisono.options import ReduceOp

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


def on_ranks(size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, make_threads(size, timeout_seconds=10)))


def rows(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As many rows as the number of the rank, some of them twice."""
    indices = torch.tensor([[i % 2 for i in range(rank)]], dtype=torch.int64)
    values = torch.arange(rank * 3).reshape(rank, 3).to(dtype) + 10**rank
    return torch.sparse_coo_tensor(indices, values, (4, 3), check_invariants=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(("op", "count"), [(SUM, None), (MEAN, None), (MEAN, 7)])
def test_made_dense_it_is_the_dense_reduction(
    size: int, dtype: torch.dtype, op: ReduceOp, count: int | None
) -> None:
    def work(communicator: Communicator) -> list[Tensor]:
        own = rows(communicator.rank, dtype)
        return [all_reduce_sparse(communicator, op, own, count) for _ in range(2)]

    divisor = 1 if op is SUM else count or size
    values = torch.cat([rows(rank, dtype)._values() for rank in range(size)])
    for results in on_ranks(size, work):
        for result in results:
            assert result.shape == (4, 3)
            torch.testing.assert_close(result._values(), values / divisor)
            assert result._indices().shape == (1, sum(range(size)))


def test_rows_are_in_the_order_of_the_ranks() -> None:
    result = on_ranks(3, lambda c: all_reduce_sparse(c, SUM, rows(c.rank)))[0]

    assert result._indices().tolist() == [[0, 0, 1]]
    assert result._values()[:, 0].tolist() == [10.0, 100.0, 103.0]


def test_other_shapes_are_told() -> None:
    def work(communicator: Communicator) -> str:
        own = torch.eye(3 + communicator.rank).to_sparse()
        with pytest.raises(UnequalCollectivesError, match=r"rank 1 .* shape \(4, 4\)") as raised:
            all_reduce_sparse(communicator, SUM, own)
        return str(raised.value.ranks)

    assert on_ranks(2, work) == ["(0, 1)", "(0, 1)"]


def test_an_operation_for_which_zeros_would_count_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="to_dense"):
        all_reduce_sparse(make_threads(1)[0], ReduceOp.MAX, torch.eye(3).to_sparse())
