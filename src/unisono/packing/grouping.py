"""Which tensors go together: three rules that split a batch into packs.

A rule is a pure function of sizes, so every replica makes the same packs.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.errors import UnsupportedError


def split_evenly(num_elements: int, num_packs: int) -> list[int]:
    """Returns the sizes of `num_packs` packs; the last one takes what is left over.

    >>> split_evenly(8, 3), split_evenly(8, 5), split_evenly(2, 3)
    ([2, 2, 4], [1, 1, 1, 1, 4], [0, 0, 2])
    """
    if num_packs < 1:
        raise UnsupportedError(f"`num_packs` must be 1 or more to split, got {num_packs}.")
    size = num_elements // num_packs
    return [size] * (num_packs - 1) + [num_elements - size * (num_packs - 1)]


def group_by_bytes(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Groups tensors, given their bytes, into packs of a little more than `bytes_per_pack`.

    Tensors are taken in order. A pack is closed once it holds *more* than `bytes_per_pack`, so a
    pack of exactly that size takes one more tensor. 0 puts everything into one pack.

    >>> group_by_bytes([128, 32, 800, 4], 200)
    [[0, 1, 2], [3]]
    """
    if bytes_per_pack == 0:
        return [list(range(len(sizes)))]
    packs: list[list[int]] = []
    pack_bytes = 0
    for index, size in enumerate(sizes):
        if not packs or pack_bytes > bytes_per_pack:
            packs.append([])
            pack_bytes = 0
        packs[-1].append(index)
        pack_bytes += size
    return packs


def group_small(is_small: Sequence[bool], max_group: int) -> list[list[int]]:
    """Groups runs of consecutive small tensors, at most `max_group` per group.

    Groups come first, then single tensors, in order. A group of one counts as a single tensor.

    >>> group_small([True, True, False, True, True, True], 2)
    [[0, 1], [3, 4], [2], [5]]
    """
    runs: list[list[int]] = []
    for index, small in enumerate(is_small):
        joins = small and index > 0 and is_small[index - 1] and len(runs[-1]) < max_group
        if joins:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [run for run in runs if len(run) > 1] + [run for run in runs if len(run) == 1]
