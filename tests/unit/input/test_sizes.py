from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.input.split.splitter import (
    filled_slices,
    rotated_sizes,
    slices_of,
    tensorflow_sizes,
)
from unisono.reductions import dealt

numbers = st.integers(0, 100)
counts = st.integers(1, 7)


@pytest.mark.parametrize(
    ("num_samples", "num_replicas", "sizes"),
    [
        (8, 4, (2, 2, 2, 2)),
        (5, 4, (2, 2, 1, 0)),  # the rest of 13 by 8 over 4
        (5, 2, (3, 2)),
        (4, 5, (1, 1, 1, 1, 0)),
        (4, 3, (2, 2, 0)),
        (1, 2, (1, 0)),
        (0, 3, (0, 0, 0)),
    ],
)
def test_the_rounded_up_share_is_given_until_nothing_is_left(
    num_samples: int, num_replicas: int, sizes: tuple[int, ...]
) -> None:
    assert tensorflow_sizes(num_samples, num_replicas) == sizes


@pytest.mark.parametrize(
    ("num_samples", "num_replicas", "sizes"),
    [(4, 3, (2, 1, 1)), (5, 4, (2, 1, 1, 1)), (2, 3, (1, 1, 0)), (0, 2, (0, 0)), (6, 2, (3, 3))],
)
def test_even_sizes_differ_by_at_most_one(
    num_samples: int, num_replicas: int, sizes: tuple[int, ...]
) -> None:
    assert dealt(num_samples, num_replicas) == sizes


@pytest.mark.parametrize(
    ("batch_size", "num_workers", "num_replicas", "by_worker"),
    [
        (7, 2, 2, [(2, 2, 2, 1), (2, 1, 2, 2)]),
        (5, 3, 1, [(2, 2, 1), (2, 1, 2), (1, 2, 2)]),
        (1, 2, 2, [(1, 0, 0, 0), (0, 0, 1, 0)]),
        (8, 1, 3, [(3, 3, 2)]),
    ],
)
def test_sizes_rotate_from_worker_to_worker(
    batch_size: int, num_workers: int, num_replicas: int, by_worker: list[tuple[int, ...]]
) -> None:
    total = num_workers * num_replicas
    found = [rotated_sizes(batch_size, total, first) for first in range(0, total, num_replicas)]

    assert found == by_worker


@pytest.mark.parametrize("sizes", [dealt, tensorflow_sizes])
@given(num_samples=numbers, num_replicas=counts)
def test_shares_hold_each_sample_once(sizes: Any, num_samples: int, num_replicas: int) -> None:
    shares = slices_of(sizes(num_samples, num_replicas))

    assert len(shares) == num_replicas
    assert [i for share in shares for i in range(num_samples)[share]] == list(range(num_samples))


@given(numbers, numbers, counts, counts)
def test_rotated_shares_hold_each_sample_once(
    batch_size: int, missing: int, num_workers: int, num_replicas: int
) -> None:
    num_samples = max(0, batch_size - missing)
    total = num_workers * num_replicas
    sizes = rotated_sizes(batch_size, total, total - num_replicas)

    shares = filled_slices(num_samples, sizes)

    assert [i for share in shares for i in range(num_samples)[share]] == list(range(num_samples))
    assert max(sizes) - min(sizes) <= 1


@given(numbers, counts, counts)
def test_every_global_step_of_rotated_sizes_is_a_full_batch(
    batch_size: int, num_workers: int, num_replicas: int
) -> None:
    total = num_workers * num_replicas
    firsts = range(0, total, num_replicas)
    by_worker = [rotated_sizes(batch_size, total, first) for first in firsts]
    steps = [sum(sum(sizes[i : i + num_replicas]) for sizes in by_worker) for i in firsts]

    assert steps == [batch_size] * num_workers
