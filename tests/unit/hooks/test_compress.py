"""Gradients in half precision: what crosses, what arrives, and what is kept for the next step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from thread_ranks import ThreadCommunicator
from torch import Tensor
from worker_threads import on_workers

from unisono.communicators import Communicator
from unisono.errors import UnsupportedError
from unisono.hooks import Compress, GradBucket, WorkersGroup
from unisono.kernels import tree_reduce
from unisono.options import ReduceOp
from unisono.workers import ConnectedWorkers

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_feedback = pytest.mark.parametrize("error_feedback", [False, True])


def bucket_of(buffer: Tensor, index: int = 0) -> GradBucket:
    return GradBucket(index, buffer, [buffer], is_last=True)


def drawn(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def reduced(
    gradients: Sequence[Tensor], hook_of: Sequence[Compress], num_steps: int = 1
) -> list[list[Tensor]]:
    """What each worker gets in each step, if it has the same gradients every time."""

    def reduce(workers: ConnectedWorkers) -> list[Tensor]:
        rank = workers.communicator.rank
        group = WorkersGroup(workers.communicator)
        buckets = [bucket_of(gradients[rank].clone()) for _ in range(num_steps)]
        return [hook_of[rank](group, bucket) for bucket in buckets]

    return on_workers(len(gradients), reduce)


def hooks(size: int, dtype: torch.dtype, *, error_feedback: bool) -> list[Compress]:
    return [Compress(dtype, error_feedback=error_feedback) for _ in range(size)]


@each_dtype
@each_feedback
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_shares_are_rounded_added_in_float32_and_rounded_once(
    size: int, length: int, dtype: torch.dtype, error_feedback: bool
) -> None:
    gradients = [drawn(rank, length) for rank in range(size)]
    shares = [(gradient / size).to(dtype).float() for gradient in gradients]
    expected = tree_reduce(ReduceOp.SUM, shares).to(dtype).float()

    for (found,) in reduced(gradients, hooks(size, dtype, error_feedback=error_feedback)):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


class Counting(ThreadCommunicator):
    """Counts the bytes that a rank brings to collectives."""

    def __init__(self, like: Communicator) -> None:
        assert isinstance(like, ThreadCommunicator)
        super().__init__(like._table, like.rank)
        self.num_bytes = 0

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        # Parts to their ranks, and sums back to all.
        self.num_bytes += 2 * sum(term.nbytes for term in terms)
        super().all_reduce(op, terms, count)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        self.num_bytes += tensor.nbytes
        return super().gather(tensor, root)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.num_bytes += tensor.nbytes * self.size
        return super().all_gather(tensor)


@each_dtype
@each_feedback
@pytest.mark.parametrize(
    ("gradients", "part"), [(torch.float32, 2), (torch.float64, 4), (torch.bfloat16, 1)], ids=str
)
def test_what_crosses_is_half_as_large(
    gradients: torch.dtype, part: int, dtype: torch.dtype, error_feedback: bool
) -> None:
    def count(workers: ConnectedWorkers) -> tuple[int, int]:
        plain, compressed = Counting(workers.communicator), Counting(workers.communicator)
        hook = Compress(dtype, error_feedback=error_feedback)
        for _ in range(2):
            plain.all_reduce(ReduceOp.MEAN, [drawn(0, 64, gradients)])
            hook(WorkersGroup(compressed), bucket_of(drawn(0, 64, gradients)))
        return plain.num_bytes, compressed.num_bytes

    for plain, compressed in on_workers(2, count):
        assert compressed * part == plain


@each_dtype
@pytest.mark.parametrize("size", [1, 2, 3])
def test_error_feedback_leaves_no_bias(size: int, dtype: torch.dtype) -> None:
    num_steps = 200
    gradients = [drawn(rank, 301) for rank in range(size)]
    exact = torch.stack(gradients).double().mean(0)

    def bias(*, error_feedback: bool) -> float:
        compress = hooks(size, dtype, error_feedback=error_feedback)
        found = reduced(gradients, compress, num_steps)[0]
        mean = torch.stack(found).double().mean(0)
        return float((mean - exact).abs().max() / torch.finfo(dtype).eps)

    # In units of the last place of 1: a rounding error at a time, or one for all steps together.
    assert bias(error_feedback=False) > 0.3
    assert bias(error_feedback=True) < 4 / num_steps


def test_a_state_dict_goes_on_to_the_bit() -> None:
    gradients = [drawn(rank, 33) for rank in range(2)]
    goes_on = hooks(2, torch.bfloat16, error_feedback=True)
    reduced(gradients, goes_on, 3)
    resumed, fresh = (hooks(2, torch.bfloat16, error_feedback=True) for _ in range(2))
    for before, after in zip(goes_on, resumed, strict=True):
        after.load_state_dict(before.state_dict())

    expected, found, forgotten = (
        torch.stack(reduced(gradients, compress, 3)[0]) for compress in (goes_on, resumed, fresh)
    )

    assert torch.equal(found, expected)
    assert not torch.equal(forgotten, expected)


def test_a_bucket_that_has_changed_begins_anew() -> None:
    (compress,) = hooks(1, torch.bfloat16, error_feedback=True)
    reduced([drawn(0, 8)], [compress])

    ((found,),) = reduced([drawn(1, 9)], [compress])

    assert torch.equal(found, drawn(1, 9).to(torch.bfloat16).float())


@each_feedback
def test_float16_overflows_only_where_the_mean_does(error_feedback: bool) -> None:
    gradients = [torch.tensor([60_000.0, 200_000.0, -200_000.0, float("nan")]) for _ in range(2)]
    compress = hooks(2, torch.float16, error_feedback=error_feedback)

    for steps in reduced(gradients, compress, 2):
        for found in steps:
            assert found[:3].tolist() == [60_000.0, float("inf"), float("-inf")]
            assert found[3].isnan()
    # Nothing of it stays.
    for (found,) in reduced([torch.ones(4)] * 2, compress):
        assert found.tolist() == [1.0] * 4


def test_no_other_dtype_is_taken() -> None:
    with pytest.raises(UnsupportedError, match=r"bfloat16 or torch\.float16, got torch\.int8"):
        Compress(torch.int8)


def test_only_the_workers_of_a_strategy_can_use_it() -> None:
    with pytest.raises(UnsupportedError, match=r"strategy\.process_group.*got 'world'"):
        Compress()("world", bucket_of(torch.ones(1)))  # type: ignore[arg-type]
