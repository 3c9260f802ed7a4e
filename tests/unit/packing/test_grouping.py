import pytest

from unisono.errors import UnsupportedError
from unisono.packing import group_by_bytes, group_small, split_evenly


@pytest.mark.parametrize(
    ("num_elements", "num_packs", "sizes"),
    [
        (8, 1, [8]),
        (8, 2, [4, 4]),
        (8, 3, [2, 2, 4]),
        (8, 5, [1, 1, 1, 1, 4]),
        (8, 8, [1] * 8),
        (8, 9, [0] * 8 + [8]),
        (8, 20, [0] * 19 + [8]),
        (0, 1, [0]),
        (0, 3, [0, 0, 0]),
        (7, 2, [3, 4]),
    ],
)
def test_the_last_pack_takes_what_is_left_over(
    num_elements: int, num_packs: int, sizes: list[int]
) -> None:
    assert split_evenly(num_elements, num_packs) == sizes


@pytest.mark.parametrize("num_packs", [0, -1])
def test_less_than_one_pack_is_refused(num_packs: int) -> None:
    with pytest.raises(UnsupportedError, match=f"1 or more to split, got {num_packs}"):
        split_evenly(8, num_packs)


@pytest.mark.parametrize(
    ("sizes", "bytes_per_pack", "packs"),
    [
        ([8, 8, 8, 8], 8, [[0, 1], [2, 3]]),
        ([8, 8, 8, 8], 7, [[0], [1], [2], [3]]),
        ([8, 8, 8, 8], 9, [[0, 1], [2, 3]]),
        ([400, 4, 4], 4, [[0], [1, 2]]),
        ([128, 32, 800, 4], 200, [[0, 1, 2], [3]]),
        ([128, 32, 800, 4], 0, [[0, 1, 2, 3]]),
        ([0, 0, 0], 1, [[0, 1, 2]]),
        ([], 0, [[]]),
        ([], 8, []),
    ],
)
def test_a_pack_is_closed_once_it_holds_more_than_asked(
    sizes: list[int], bytes_per_pack: int, packs: list[list[int]]
) -> None:
    assert group_by_bytes(sizes, bytes_per_pack) == packs


@pytest.mark.parametrize(
    ("small", "max_group", "groups"),
    [
        ("yyyyy", 5, [[0, 1, 2, 3, 4]]),
        ("yyyyy", 2, [[0, 1], [2, 3], [4]]),
        ("yynyy", 9, [[0, 1], [3, 4], [2]]),
        ("nynyn", 9, [[0], [1], [2], [3], [4]]),
        ("nnyyn", 9, [[2, 3], [0], [1], [4]]),
        ("yyyy", 1, [[0], [1], [2], [3]]),
        ("nnn", 9, [[0], [1], [2]]),
        ("y", 9, [[0]]),
        ("", 9, []),
    ],
)
def test_neighbours_that_are_small_share_a_group(
    small: str, max_group: int, groups: list[list[int]]
) -> None:
    assert group_small([letter == "y" for letter in small], max_group) == groups


@pytest.mark.parametrize("max_group", range(1, 12))
def test_no_group_is_larger_than_allowed(max_group: int) -> None:
    groups = group_small([True] * 30, max_group)

    assert max(map(len, groups)) == max_group
    assert sorted(index for group in groups for index in group) == list(range(30))
