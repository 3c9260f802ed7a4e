import pytest
import torch

from unisono.errors import UnsupportedError
from unisono.packing import (
    BytesPerPack,
    NoPacking,
    NumPacks,
    PackingRule,
    PackLayout,
    SmallGroups,
    Spec,
)


def floats(*sizes: int) -> list[Spec]:
    return [Spec(torch.Size((size,)), torch.float32) for size in sizes]


def members(layout: PackLayout) -> list[list[int]]:
    return [[segment.tensor for segment in pack] for pack in layout.packs]


def test_without_packing_each_tensor_is_a_pack() -> None:
    assert members(NoPacking().layout(floats(1, 2, 3))) == [[0], [1], [2]]


@pytest.mark.parametrize("num_packs", [1, 2, 3, 8, 100])
def test_a_number_of_packs_is_kept_for_each_dtype(num_packs: int) -> None:
    whole = Spec(torch.Size((5,)), torch.int32)

    assert len(NumPacks(num_packs).layout(floats(1, 3, 4)).packs) == num_packs
    assert len(NumPacks(num_packs).layout([*floats(8), whole]).packs) == 2 * num_packs


def test_one_pack_holds_everything_in_the_order_of_the_batch() -> None:
    assert members(NumPacks(1).layout(floats(1, 3, 4))) == [[0, 1, 2]]


def test_bytes_are_counted_from_the_last_tensor() -> None:
    # From behind: 4, 800, 32 and 128 bytes; 4 + 800 is more than 200.
    assert members(BytesPerPack(200).layout(floats(32, 8, 200, 1))) == [[3, 2], [1, 0]]


def test_small_tensors_are_those_up_to_the_limit() -> None:
    # 12, 16 and 20 bytes with a limit of 16, which is inclusive.
    assert members(SmallGroups(16, 10).layout(floats(3, 4, 5, 4, 3))) == [[0, 1], [3, 4], [2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16])
def test_only_float32_counts_as_small(dtype: torch.dtype) -> None:
    specs = [Spec(torch.Size((1,)), dtype)] * 2

    assert members(SmallGroups(1000, 10).layout(specs)) == [[0], [1]]


@pytest.mark.parametrize(("max_bytes", "max_group"), [(0, 10), (10, 0), (-1, 10), (10, -1)])
def test_a_limit_that_lets_nothing_in_is_refused(max_bytes: int, max_group: int) -> None:
    with pytest.raises(UnsupportedError, match=f"above 0, got {max_bytes} and {max_group}"):
        SmallGroups(max_bytes, max_group)


@pytest.mark.parametrize("rule", [NoPacking(), NumPacks(2), BytesPerPack(8), SmallGroups(8, 8)])
def test_no_tensor_needs_no_pack(rule: PackingRule) -> None:
    layout = rule.layout([])

    assert layout.pack([]) == []
    assert layout.unpack([]) == []
