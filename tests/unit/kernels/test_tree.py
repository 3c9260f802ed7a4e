"""The order of a sum, against the same tree written out by hand with NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tables import every
from torch import Tensor

from unisono.kernels import divide, reduce_batch, result_dtype, tree_reduce, wide_dtype
from unisono.options import ReduceOp

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}

each_dtype = every("dtype", FLOATS + COMPLEX + SIGNED + UNSIGNED)


@each_dtype
@every("num_replicas", range(1, 18))
def test_a_sum_has_the_bits_of_the_tree(dtype: torch.dtype, num_replicas: int) -> None:
    tensors = [numbers(dtype) for _ in range(num_replicas)]

    total = tree_reduce(ReduceOp.SUM, tensors)

    assert_same_bits(total, tree_by_hand(np.add, tensors))


# Complex numbers have no order, and NumPy rounds their products differently.
@every("dtype", FLOATS + SIGNED + UNSIGNED)
@every("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD])
@every("num_replicas", [1, 2, 7])
def test_other_operations_follow_the_same_tree(
    op: ReduceOp, dtype: torch.dtype, num_replicas: int
) -> None:
    tensors = [numbers(dtype) for _ in range(num_replicas)]
    by_op = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PROD: np.multiply}

    with np.errstate(over="ignore"):
        assert_same_bits(tree_reduce(op, tensors), tree_by_hand(by_op[op], tensors))


def test_neighbours_are_added_first() -> None:
    # One after the other it would be ((1e8 + 1) - 1e8) + 1 = 1; float32 drops the 1 next to 1e8.
    tensors = [torch.tensor(x, dtype=torch.float32) for x in (1e8, 1, -1e8, 1)]

    assert tree_reduce(ReduceOp.SUM, tensors).item() == 0


def test_an_odd_last_replica_joins_at_the_top() -> None:
    # (1e8 - 1e8) + 1: with the last two first, the 1 would be lost.
    tensors = [torch.tensor(x, dtype=torch.float32) for x in (1e8, -1e8, 1)]

    assert tree_reduce(ReduceOp.SUM, tensors).item() == 1


@pytest.mark.parametrize(("dtype", "base"), [(torch.float16, 2048), (torch.bfloat16, 256)])
def test_half_precision_is_rounded_once(dtype: torch.dtype, base: int) -> None:
    # Neighbors of `base` are 2 apart. Rounded at each step, (base + 1) + (1 + 1) is base + 2.
    tensors = [torch.tensor(x, dtype=dtype) for x in (base, 1, 1, 1)]

    assert tree_reduce(ReduceOp.SUM, tensors).item() == base + 4


def test_a_mean_in_half_precision_is_rounded_once() -> None:
    # 2049 / 3 = 683; rounded first, 2048 / 3 would give 682.5.
    tensors = [torch.tensor(x, dtype=torch.float16) for x in (2048, 1, 0)]

    assert tree_reduce(ReduceOp.MEAN, tensors).item() == 683


def test_a_mean_in_half_precision_does_not_overflow() -> None:
    tensors = [torch.tensor(60000, dtype=torch.float16)] * 2

    assert tree_reduce(ReduceOp.MEAN, tensors).item() == 60000


@pytest.mark.parametrize("dtype", SIGNED + UNSIGNED, ids=str)
def test_sums_of_integers_wrap(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    tensors = [torch.tensor(x, dtype=dtype) for x in (limits.max, 1)]

    assert tree_reduce(ReduceOp.SUM, tensors).item() == limits.min


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_numbers_above_the_middle_compare_as_large(dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max
    tensors = [torch.tensor(x, dtype=dtype) for x in ([top, 1, top], [1, top, top], [2, 2, top])]

    assert tree_reduce(ReduceOp.MAX, tensors).tolist() == [top, top, top]
    assert tree_reduce(ReduceOp.MIN, tensors).tolist() == [1, 1, top]


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.int8, torch.float32),
        (torch.int16, torch.float32),
        (torch.uint8, torch.float32),
        (torch.uint16, torch.float32),
        (torch.int32, torch.float64),
        (torch.int64, torch.float64),
        (torch.uint32, torch.float64),
        (torch.uint64, torch.float64),
        *((dtype, dtype) for dtype in FLOATS + COMPLEX),
    ],
    ids=str,
)
def test_a_mean_is_a_true_division(dtype: torch.dtype, result: torch.dtype) -> None:
    mean = tree_reduce(ReduceOp.MEAN, [torch.tensor([x]).to(dtype) for x in (1, 2)])

    assert result_dtype(ReduceOp.MEAN, dtype) == mean.dtype == result
    assert mean.item() == 1.5


@each_dtype
@every("op", [op for op in ReduceOp if op is not ReduceOp.MEAN])
def test_only_a_mean_changes_the_dtype(op: ReduceOp, dtype: torch.dtype) -> None:
    assert result_dtype(op, dtype) == dtype


@each_dtype
def test_partial_results_are_kept_wide(dtype: torch.dtype) -> None:
    assert wide_dtype(dtype) == WIDE.get(dtype, dtype)


@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (3,), (2, 1, 3)], ids=str)
def test_the_shape_stays(shape: tuple[int, ...]) -> None:
    total = tree_reduce(ReduceOp.SUM, [torch.full(shape, 10.0**i) for i in range(3)])

    assert total.shape == shape
    assert (total == 111).all()


@each_dtype
def test_the_result_of_one_replica_is_a_copy(dtype: torch.dtype) -> None:
    tensor = numbers(dtype)

    total = tree_reduce(ReduceOp.SUM, [tensor])

    assert_same_bits(total, tensor)
    assert total.data_ptr() != tensor.data_ptr()


def test_nan_wins_every_operation() -> None:
    tensors = [torch.tensor(x) for x in (1.0, float("nan"), 3.0)]

    for op in ReduceOp:
        assert tree_reduce(op, tensors).isnan()


def test_the_result_is_detached() -> None:
    leaf = torch.ones(2, requires_grad=True)

    assert not tree_reduce(ReduceOp.SUM, [leaf, leaf * 2]).requires_grad


def test_conjugated_views_count_as_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])

    total = tree_reduce(ReduceOp.SUM, [tensor.conj(), tensor.conj(), tensor])

    assert total.tolist() == [3 - 2j, 9 + 4j]
    assert not tree_reduce(ReduceOp.SUM, [tensor.conj()]).is_conj()


def test_negated_views_count_as_what_they_show() -> None:
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negated.is_neg()

    assert tree_reduce(ReduceOp.SUM, [negated, torch.ones(2)]).tolist() == [-1, 5]
    assert tree_reduce(ReduceOp.SUM, [negated]).tolist() == [-2, 4]


def test_a_complex_mean_divides_both_parts() -> None:
    mean = divide(torch.tensor([3 + 6j]), 3, torch.complex64)

    assert mean.tolist() == [1 + 2j]


def numbers(dtype: torch.dtype) -> Tensor:
    """Numbers of very different size, so that another order would give other bits."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2**62, (33,)).to(torch.int64).to(dtype)
    scale = 10.0 ** torch.randint(-3, 4, (33,))
    if dtype.is_complex:
        return (torch.randn(33, dtype=torch.complex128) * scale).to(dtype)
    return (torch.randn(33, dtype=torch.float64) * scale).to(dtype)


def tree_by_hand(combine: Callable[[Any, Any], Any], tensors: Sequence[Tensor]) -> Tensor:
    """Splits at the largest power of two below the number of replicas, and so on in each half."""
    dtype = tensors[0].dtype

    def node(arrays: list[Any]) -> Any:
        if len(arrays) == 1:
            return arrays[0]
        middle = next(m for m in (16, 8, 4, 2, 1) if m < len(arrays))
        return combine(node(arrays[:middle]), node(arrays[middle:]))

    wide = WIDE.get(dtype, dtype)
    return torch.from_numpy(node([tensor.to(wide).numpy() for tensor in tensors])).to(dtype)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_equal_zeros_keep_the_sign_of_the_first(path: str, op: ReduceOp, length: int) -> None:
    zeros = [torch.full((length,), zero) for zero in (0.0, 0.0, -0.0)]

    ((result,),) = reduce_batch(op, [zeros], [1])

    assert not result.signbit().any()
