"""A batch of reductions, through the native core and through torch."""

from collections.abc import Callable

import pytest
import torch
from tables import every
from torch import Tensor

from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.kernels import reduce_batch, reduce_fused, reduce_into, tree_reduce
from unisono.options import ReduceOp

pytestmark = [
    pytest.mark.usefixtures("path"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]


ORDERED = (ReduceOp.MIN, ReduceOp.MAX)


@every(
    ("op", "dtype"),
    [
        *((op, dtype) for op in ReduceOp for dtype in FLOATS + INTEGERS),
        *((op, dtype) for op in ReduceOp if op not in ORDERED for dtype in COMPLEX),
    ],
)
def test_both_paths_have_the_bits_of_the_tree(op: ReduceOp, dtype: torch.dtype) -> None:
    for num_replicas in range(1, 18):
        tensors = [(torch.randn(37) * 50).to(torch.int64).to(dtype) for _ in range(num_replicas)]
        if dtype.is_floating_point or dtype.is_complex:
            tensors = [tensor + torch.rand(37).to(dtype) for tensor in tensors]

        ((result,),) = reduce_batch(op, [tensors], [1])

        assert_same_bits(result, tree_reduce(op, tensors))


@pytest.mark.parametrize("num_copies", [0, 1, 2, 5])
def test_each_copy_has_memory_of_its_own(num_copies: int) -> None:
    tensors = [torch.full((3,), 10.0**i) for i in range(3)]

    (copies,) = reduce_batch(ReduceOp.SUM, [tensors], [num_copies])

    assert [copy.tolist() for copy in copies] == [[111, 111, 111]] * num_copies
    pointers = {tensor.data_ptr() for tensor in (*copies, *tensors)}
    assert len(pointers) == num_copies + 3


def test_items_may_differ_in_all_but_the_operation() -> None:
    batch = [
        [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])],
        [torch.tensor(3, dtype=torch.int32)],
        [torch.ones((1, 0)), torch.ones((1, 0)), torch.ones((1, 0))],
    ]

    for _ in range(2):
        first, second, third = reduce_batch(ReduceOp.SUM, batch, [2, 1, 1])

        assert [copy.tolist() for copy in first] == [[11, 22], [11, 22]]
        assert [copy.item() for copy in second] == [3]
        assert [copy.shape for copy in third] == [(1, 0)]


def test_an_empty_batch_has_no_results() -> None:
    assert reduce_batch(ReduceOp.SUM, [], []) == []


@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (1,), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_every_shape_is_kept(op: ReduceOp, shape: tuple[int, ...]) -> None:
    tensors = [torch.full(shape, 3.0 * 10**i) for i in range(3)]

    ((result,),) = reduce_batch(op, [tensors], [1])

    assert result.shape == shape
    assert (result == (333 if op is ReduceOp.SUM else 111)).all()


def test_large_tensors_are_reduced_to_their_last_element() -> None:
    tensors = [torch.full((1_000_003,), 10.0**i) for i in range(3)]

    ((result,),) = reduce_batch(ReduceOp.SUM, [tensors], [1])

    assert result.equal(torch.full((1_000_003,), 111.0))


def test_channels_last_stays_channels_last() -> None:
    shape = (2, 3, 4, 5)
    tensors = [torch.randn(shape).to(memory_format=torch.channels_last) for _ in range(3)]

    (results,) = reduce_batch(ReduceOp.SUM, [tensors], [2])

    for result in results:
        assert result.is_contiguous(memory_format=torch.channels_last)
        assert_same_bits(result, tree_reduce(ReduceOp.SUM, [t.contiguous() for t in tensors]))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[:, 1:],
        lambda t: t[:1].expand(4, 6),
        lambda t: t.unfold(1, 3, 1),
    ],
    ids=["transposed", "strided", "offset", "expanded", "overlapping"],
)
def test_views_count_as_what_they_show(view: Callable[[Tensor], Tensor]) -> None:
    tensors = [view(torch.randn(4, 6)) for _ in range(3)]

    ((result,),) = reduce_batch(ReduceOp.SUM, [tensors], [1])

    assert_same_bits(result, tree_reduce(ReduceOp.SUM, [t.contiguous() for t in tensors]))


def test_replicas_may_lie_in_memory_each_in_its_own_way() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t().contiguous()]
    mixed = [tensors[0], tensors[1].t().contiguous().t()]

    ((result,),) = reduce_batch(ReduceOp.SUM, [mixed], [1])

    assert result.tolist() == [[0, 3, 6], [4, 7, 10]]


def test_conjugated_and_negated_views_count_as_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])

    ((conjugated,),) = reduce_batch(ReduceOp.SUM, [[tensor.conj(), tensor.conj()]], [1])
    ((negated,),) = reduce_batch(ReduceOp.SUM, [[tensor.conj().imag, torch.zeros(2)]], [1])

    assert conjugated.tolist() == [2 - 4j, 6 + 8j]
    assert negated.tolist() == [-2, 4]


def test_parameters_are_read_and_results_are_plain_and_detached() -> None:
    parameters = [torch.nn.Parameter(torch.full((2,), 10.0**i)) for i in range(3)]

    ((result,),) = reduce_batch(ReduceOp.SUM, [parameters], [1])

    assert result.tolist() == [111, 111]
    assert type(result) is Tensor
    assert not result.requires_grad


def test_the_tensors_given_are_left_alone() -> None:
    tensors = [torch.full((100,), 10.0**i) for i in range(3)]

    reduce_batch(ReduceOp.MEAN, [tensors], [3])

    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [10], [100]]


def test_results_outlive_the_batch_and_each_other() -> None:
    ((first, second),) = reduce_batch(ReduceOp.SUM, [[torch.ones(2), torch.ones(2)]], [2])
    del first
    for _ in range(3):
        reduce_batch(ReduceOp.SUM, [[torch.zeros(2), torch.zeros(2)]], [2])

    assert second.add_(5).tolist() == [7, 7]


def test_an_item_that_does_not_go_together_is_named_in_a_batch() -> None:
    good = [torch.ones(2), torch.ones(2)]

    with pytest.raises(ReplicaMismatchError, match="Value 1 of the batch must have the same shape"):
        reduce_batch(ReduceOp.SUM, [good, [torch.ones(2), torch.ones(3)]], [1, 1])


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.SUM, torch.bool),
        (ReduceOp.MAX, torch.bool),
        (ReduceOp.MAX, torch.complex64),
        (ReduceOp.SUM, torch.float8_e5m2),
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_refused(op: ReduceOp, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=str(dtype)):
        reduce_batch(op, [[torch.ones(2).to(dtype)] * 2], [1])


def test_what_is_left_to_torch_is_none() -> None:
    transposed = torch.ones(2, 3).t()

    assert reduce_fused(ReduceOp.SUM, [[transposed, transposed]], [1]) == [None]


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_channels_last_is_reduced_in_place(num_replicas: int, path: str) -> None:
    tensors = [
        torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last) for _ in range(num_replicas)
    ]
    expected = tree_reduce(ReduceOp.MEAN, tensors)

    is_done = reduce_into(ReduceOp.MEAN, [tensors], [tensors])

    assert is_done == (path == "native")
    if not is_done:
        return
    for tensor in tensors:
        assert torch.equal(tensor, expected)
        assert tensor.is_contiguous(memory_format=torch.channels_last)
