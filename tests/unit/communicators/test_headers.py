"""What a collective is called, and what is said when ranks do not agree."""

import pytest
import torch

from unisono.communicators.headers import (
    HEADER_BYTES,
    Header,
    check_agreement,
    ranks_in_words,
)
from unisono.errors import UnequalCollectivesError, UnsupportedError
from unisono.options import ReduceOp

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
ONES = torch.ones(3, 4)
HEADERS = {
    "all_reduce number 12: sum of 1 float32 tensor of shape (3, 4)": Header.of_terms(
        "all_reduce", 12, SUM, [ONES], None
    ),
    "reduce_scatter number 1: mean over 8 of 2 float32 tensors of shape (3, 4)": Header.of_terms(
        "reduce_scatter", 1, MEAN, [ONES, ONES], 8
    ),
    "gather number 3 to rank 1: 1 bool tensor of shape ()": Header.of_tensor(
        "gather", 3, torch.tensor(True), 1
    ),
    "broadcast number 4 from rank 0: 1 float32 tensor of shape (3, 4)": Header.of_tensor(
        "broadcast", 4, ONES, 0
    ),
    "barrier number 5": Header("barrier", 5),
}


@pytest.mark.parametrize("text", HEADERS)
def test_a_header_reads_well_and_survives_the_journey(text: str) -> None:
    encoded = HEADERS[text].encode()

    assert str(HEADERS[text]) == text
    assert len(encoded) == HEADER_BYTES
    assert Header.decode(encoded) == HEADERS[text]


def test_shapes_may_differ_where_tensors_are_gathered_and_nowhere_else() -> None:
    long, short = torch.ones(5), torch.ones(2)

    for kind in ("all_gather", "gather"):
        check_agreement({r: Header.of_tensor(kind, 1, t) for r, t in enumerate([long, short])})
    with pytest.raises(UnequalCollectivesError, match=r"rank 0 called broadcast .*\(5,\); rank 1"):
        check_agreement(
            {r: Header.of_tensor("broadcast", 1, t, 0) for r, t in enumerate([long, short])}
        )


def test_the_few_are_at_fault_and_all_are_where_nobody_can_tell() -> None:
    barrier, other = Header("barrier", 1), Header("barrier", 2)

    with pytest.raises(UnequalCollectivesError, match="ranks 0, 1 and 5 called") as few:
        check_agreement({0: barrier, 1: barrier, 3: other, 5: barrier})
    with pytest.raises(UnequalCollectivesError) as all_of_them:
        check_agreement({0: barrier, 1: other})

    assert few.value.ranks == (3,)
    assert all_of_them.value.ranks == (0, 1)


@pytest.mark.parametrize(
    ("op", "terms", "said"),
    [
        (SUM, [], "at least one term"),
        (SUM, [torch.tensor(True)], "torch.bool"),
        (MEAN, [torch.ones(2, dtype=torch.int32)], "mean of torch.int32 has another dtype"),
        (SUM, [torch.ones(3, 4).t()], "contiguous"),
        (SUM, [torch.eye(2).to_sparse()], "all_reduce_sparse"),
        (SUM, [torch.ones(2), torch.ones(3)], "same shape"),
    ],
)
def test_terms_that_cannot_be_reduced_are_refused(
    op: ReduceOp, terms: list[torch.Tensor], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Header.of_terms("all_reduce", 1, op, terms, None)


def test_a_shape_that_is_too_long_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Flatten it first"):
        Header("barrier", 1, shape=(10**9,) * 60).encode()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 2], "ranks 1 and 2"), ([0, 1, 2], "ranks 0, 1 and 2")],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_in_words(ranks) == text
