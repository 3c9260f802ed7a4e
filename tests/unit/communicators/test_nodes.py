"""Sums of ranks that bring different numbers of terms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from thread_ranks import ThreadCommunicator, make_threads
from torch import Tensor

from unisono.communicators import (
    Communicator,
    Node,
    all_reduce_nodes,
    nodes_of,
    plain_terms,
)
from unisono.errors import UnequalCollectivesError
from unisono.kernels import tree_reduce
from unisono.options import ReduceOp

SUM, MEAN, MIN, PROD = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.PROD
# More than is sent in one message.
LARGE = 20_001


def on_ranks(size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, make_threads(size, timeout_seconds=20)))


def ranges_of(counts: Sequence[int]) -> list[range]:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def reduced(
    counts: Sequence[int], op: ReduceOp, values: list[Tensor], count: int | None = None
) -> list[Tensor]:
    """What each rank gets, which combines its nodes in a wide dtype first."""
    nodes = [nodes_of(own.start, own.stop, sum(counts)) for own in ranges_of(counts)]
    are_sums = any(b - a > 1 for own in nodes for a, b in own)
    combine = SUM if op is MEAN else op
    is_half = values[0].dtype is torch.bfloat16

    def work(communicator: Communicator) -> Tensor:
        terms = []
        for start, stop in nodes[communicator.rank]:
            own = [v.float() if are_sums and is_half else v for v in values[start:stop]]
            terms.append(tree_reduce(combine, own))
        all_reduce_nodes(communicator, op, terms, nodes, count)
        return terms[0].to(values[0].dtype)

    return on_ranks(len(counts), work)


@pytest.mark.parametrize(
    "counts", [(3, 3, 2), (2, 1, 1), (3, 2), (1, 3), (1, 2, 3, 1), (5, 6), (7,)]
)
@pytest.mark.parametrize("length", [0, 1, 5, LARGE])
@pytest.mark.parametrize("op", [SUM, MEAN, MIN])
def test_the_bits_are_those_of_one_rank_with_all_replicas(
    counts: tuple[int, ...], length: int, op: ReduceOp
) -> None:
    generator = torch.Generator().manual_seed(length)
    values = [torch.randn(length, generator=generator) for _ in range(sum(counts))]

    for found in reduced(counts, op, values):
        assert torch.equal(found, tree_reduce(op, values))


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.bfloat16, SUM),
        (torch.bfloat16, MEAN),
        (torch.float64, MEAN),
        (torch.int64, SUM),
        (torch.uint8, PROD),
        (torch.complex64, MEAN),
        (torch.complex64, PROD),
    ],
)
@pytest.mark.parametrize("length", [3, LARGE])
def test_every_dtype_has_the_bits_of_one_rank(
    dtype: torch.dtype, op: ReduceOp, length: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [(torch.randn(length, generator=generator) * 3).to(dtype) for _ in range(8)]

    for found in reduced((3, 3, 2), op, values):
        assert found.dtype == dtype
        assert torch.equal(found, tree_reduce(op, values))


def test_a_mean_is_divided_by_what_the_caller_says() -> None:
    values = [torch.full((2,), float(i)) for i in range(4)]

    for found in reduced((3, 1), MEAN, values, count=12):
        assert found.tolist() == [0.5, 0.5]


def test_a_shape_is_kept() -> None:
    def work(communicator: Communicator) -> Tensor:
        nodes = [nodes_of(0, 3, 4), nodes_of(3, 4, 4)]
        terms = [torch.ones(2, 3) for _ in nodes[communicator.rank]]
        all_reduce_nodes(communicator, SUM, terms, nodes)
        return terms[0]

    for found in on_ranks(2, work):
        assert found.tolist() == [[3.0] * 3] * 2


class OwnOrder(ThreadCommunicator):
    """Adds up in its own order, as NCCL does."""

    def keeps_order(self, tensor: Tensor) -> bool:
        return False


def test_ranks_that_add_in_their_own_order_bring_one_term_each() -> None:
    nodes = [nodes_of(0, 3, 8), nodes_of(3, 6, 8), nodes_of(6, 8, 8)]
    values = [torch.tensor([float(i)]) for i in range(8)]

    def work(communicator: Any) -> float:
        own = OwnOrder(communicator._table, communicator.rank)
        terms = [sum(values[a:b], torch.zeros(1)) for a, b in nodes[own.rank]]
        all_reduce_nodes(own, MEAN, terms, nodes)
        return terms[0].item()

    assert on_ranks(3, work) == [3.5] * 3


@pytest.mark.parametrize("length", [3, LARGE])
@pytest.mark.parametrize("is_op", [True, False])
def test_other_calls_are_told_on_all_ranks(length: int, is_op: bool) -> None:
    nodes = [nodes_of(0, 3, 4), nodes_of(3, 4, 4)]

    def work(communicator: Communicator) -> str:
        is_odd = communicator.rank == 1
        dtype = torch.float32 if is_op or not is_odd else torch.int32
        terms = [torch.ones(length, dtype=dtype) for _ in nodes[communicator.rank]]
        with pytest.raises(UnequalCollectivesError) as caught:
            all_reduce_nodes(communicator, MIN if is_op and is_odd else SUM, terms, nodes)
        return str(caught.value)

    for text in on_ranks(2, work):
        assert "rank 0 called all_reduce" in text
        assert "rank 1 called all_reduce" in text
        assert ("min" if is_op else "int32") in text.lower()


def test_nodes_are_the_fewest_subtrees() -> None:
    for total in range(1, 20):
        for start in range(total):
            for stop in range(start + 1, total + 1):
                nodes = nodes_of(start, stop, total)
                assert nodes[0].start == start
                assert nodes[-1].stop == stop
                assert all(a.stop == b.start for a, b in itertools.pairwise(nodes))
                for node in nodes:
                    assert _is_node(node, total)
        assert nodes_of(0, total, total) == [Node(0, total)]


def _is_node(node: Node, total: int) -> bool:
    widths = [1 << i for i in range(total.bit_length() + 1)]
    return any(node.start % w == 0 and node.stop == min(node.start + w, total) for w in widths)


def test_plain_terms_make_the_tree_of_all_replicas() -> None:
    """The levels of the tree over terms are those of the tree over replicas."""
    for counts in [
        (1, 1),
        (2, 2),
        (3, 3),
        (6, 6),
        (2, 1),
        (4, 3),
        (2, 2, 1),
        (4, 4, 1),
        (2, 2, 2, 1),
    ]:
        together = plain_terms(ranges_of(counts))
        assert together is not None
        values = [torch.tensor([10.0 ** (i % 9) + 0.1 * i]) for i in range(sum(counts))]
        terms = [
            tree_reduce(SUM, values[first : min(first + together, own.stop)])
            for own in ranges_of(counts)
            for first in range(own.start, own.stop, together)
        ]
        assert torch.equal(tree_reduce(SUM, terms), tree_reduce(SUM, values))


@pytest.mark.parametrize("counts", [(3, 3, 2), (3, 2), (2, 1, 1), (1, 2), (3, 2, 2)])
def test_other_layouts_have_no_plain_terms(counts: tuple[int, ...]) -> None:
    assert plain_terms(ranges_of(counts)) is None
