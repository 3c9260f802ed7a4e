"""Every schedule over every grouping gives the bits of the tree."""

from collections.abc import Hashable, Iterator

import pytest
import torch
from tables import every
from torch import Tensor

from unisono.algorithms import Schedule, make_plan, one_device, run, two_level
from unisono.devices import Groups, halves
from unisono.kernels import tree_reduce
from unisono.options import ReduceOp

pytestmark = pytest.mark.usefixtures("path")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int32]


@pytest.mark.parametrize("num_replicas", range(1, 10))
def test_every_device_ends_with_the_sum(num_replicas: int) -> None:
    powers = [torch.tensor(10**i) for i in range(num_replicas)]

    for schedule in schedules(num_replicas):
        for _ in range(2):
            held = all_reduced(schedule, ReduceOp.SUM, powers)

            assert [total.item() for total in held] == [int("1" * num_replicas)] * num_replicas


@every("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD])
@every("dtype", DTYPES)
@pytest.mark.parametrize("num_replicas", range(1, 10))
def test_every_schedule_has_the_bits_of_the_tree(
    num_replicas: int, dtype: torch.dtype, op: ReduceOp
) -> None:
    tensors = numbers(num_replicas, dtype)
    expected = tree_reduce(op, tensors)

    for schedule in schedules(num_replicas):
        for held in all_reduced(schedule, op, tensors):
            assert_same_bits(held, expected)


@pytest.mark.parametrize("num_replicas", range(1, 6))
def test_every_grouping_and_turn_has_the_bits_of_the_tree(num_replicas: int) -> None:
    tensors = numbers(num_replicas, torch.bfloat16)
    expected = tree_reduce(ReduceOp.MEAN, tensors)

    for groups in partitions(num_replicas):
        for turn in range(num_replicas):
            for held in all_reduced(two_level(groups, turn=turn), ReduceOp.MEAN, tensors):
                assert_same_bits(held, expected)


@every(
    "groups",
    [
        ((0, 2), (1, 3)),
        ((0, 1, 2), (3, 4, 5)),
        ((5, 0), (4, 1), (3, 2)),
        ((0, 3, 6), (1, 4, 7), (2, 5, 8)),
        ((8,), (0, 1, 2, 3, 4, 5, 6, 7)),
        ((0, 1, 2), (3, 4), (5, 6, 7, 8)),
    ],
)
@every("dtype", DTYPES)
def test_groups_that_are_no_whole_subtrees_have_the_bits_of_the_tree(
    groups: Groups, dtype: torch.dtype
) -> None:
    num_replicas = sum(map(len, groups))
    tensors = numbers(num_replicas, dtype)
    expected = tree_reduce(ReduceOp.SUM, tensors)

    for turn in range(num_replicas):
        for held in all_reduced(two_level(groups, turn=turn), ReduceOp.SUM, tensors):
            assert_same_bits(held, expected)


@pytest.mark.parametrize("memories", ["aaaa", "aabb", "abab", "abba", "abcc", "abcd"])
def test_any_sharing_of_memories_has_the_bits_of_the_tree(memories: str) -> None:
    tensors = numbers(4, torch.float16)
    expected = tree_reduce(ReduceOp.SUM, tensors)

    for schedule in schedules(4):
        for held in all_reduced(schedule, ReduceOp.SUM, tensors, tuple(memories)):
            assert_same_bits(held, expected)


@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (2, 3)], ids=str)
def test_every_shape_is_kept(shape: tuple[int, ...]) -> None:
    tensors = [torch.full(shape, 10.0**i) for i in range(3)]

    for schedule in schedules(3):
        for held in all_reduced(schedule, ReduceOp.SUM, tensors):
            assert held.equal(torch.full(shape, 111.0))


@pytest.mark.parametrize("memories", ["aaa", "abb", "abc"])
def test_results_share_memory_with_nothing(memories: str) -> None:
    tensors = [torch.full((2,), 10.0**i) for i in range(3)]

    for schedule in schedules(3):
        held = all_reduced(schedule, ReduceOp.SUM, tensors, tuple(memories))
        for i, total in enumerate(held):
            total.fill_(i)

        assert [total.tolist() for total in held] == [[0, 0], [1, 1], [2, 2]]
        assert [tensor.tolist() for tensor in tensors] == [[1, 1], [10, 10], [100, 100]]


def test_a_batch_may_mix_dtypes_and_shapes() -> None:
    batch = [
        (torch.tensor([1.0]), torch.tensor([10.0])),
        (torch.tensor(3, dtype=torch.int32), torch.tensor(4, dtype=torch.int32)),
    ]
    plan = make_plan(one_device(2, destinations=[0, 1]), 2, ("a", "b"), (0, 1))

    results = run(plan, ReduceOp.MEAN, batch, [CPU, CPU])

    assert [[t.tolist() for t in item] for item in results] == [[[5.5], [5.5]], [3.5, 3.5]]


def test_an_empty_batch_has_no_results() -> None:
    plan = make_plan(one_device(2, destinations=[0]), 2, ("a", "b"), (0,))

    assert run(plan, ReduceOp.SUM, [], [CPU, CPU]) == []


def schedules(num_replicas: int) -> list[Schedule]:
    everywhere = range(num_replicas)
    return [
        *(one_device(num_replicas, root=root, destinations=everywhere) for root in everywhere),
        *(two_level(halves(num_replicas), turn=turn) for turn in everywhere),
        two_level([list(everywhere)]),
        two_level([[place] for place in everywhere]),
    ]


def partitions(num_replicas: int) -> Iterator[Groups]:
    """Every way to put the replicas into groups."""
    if num_replicas == 0:
        yield ()
        return
    last = num_replicas - 1
    for groups in partitions(last):
        yield (*groups, (last,))
        for i, group in enumerate(groups):
            yield (*groups[:i], (*group, last), *groups[i + 1 :])


def numbers(num_replicas: int, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of very different size, so that another order would give other bits."""
    scales = 10.0 ** torch.randint(-3, 4, (num_replicas, 9))
    made = torch.randn(num_replicas, 9, dtype=torch.float64) * scales
    if dtype.is_complex:
        return list(torch.complex(made, made.flip(0)).to(dtype))
    return list(made.to(dtype))


def all_reduced(
    schedule: Schedule,
    op: ReduceOp,
    tensors: list[Tensor],
    memories: tuple[Hashable, ...] | None = None,
) -> tuple[Tensor, ...]:
    everywhere = tuple(range(len(tensors)))
    plan = make_plan(schedule, len(tensors), memories or everywhere, everywhere)
    (held,) = run(plan, op, [tensors], [CPU] * len(tensors))
    return held


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.view(torch.uint8).equal(expected.view(torch.uint8))
