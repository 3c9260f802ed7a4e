"""Replicas together read what one device reads: each sample once, in the same batch.

`UNISONO_INPUTS` sets how many inputs there are, and `UNISONO_INPUT_SEED` the seed of the first.
"""

from __future__ import annotations

import os

import pytest

from programs.random_inputs import RandomInput, are_equal, are_parts
from unisono.errors import UnsupportedError

NUM_INPUTS = int(os.environ.get("UNISONO_INPUTS", "150"))
FIRST_SEED = int(os.environ.get("UNISONO_INPUT_SEED", "0"))

pytestmark = pytest.mark.timeout(300 + NUM_INPUTS)


def difference(drawn: RandomInput) -> str | None:
    """Returns what differs between one device and replicas, in words."""
    plain, distributed = drawn.read(), drawn.read_distributed()
    dim = drawn.options.get("batch_dim", 0)
    for epoch, (expected, found) in enumerate(zip(plain, distributed, strict=True)):
        if len(found) != len(expected):
            return f"epoch {epoch} has {len(found)} steps instead of {len(expected)}"
        for step, (one, many) in enumerate(zip(expected, found, strict=True)):
            (batch, numbers), (parts, counts, other_numbers) = one, many
            pairs = [pair for pair in zip(parts, counts, strict=True) if pair[1]]
            own, sizes = map(list, zip(*pairs, strict=True))
            is_same = are_equal(own[0], batch) if len(parts) == 1 else False
            samples = [one for part in own for one in drawn.samples(part) or ()]
            if (
                not are_equal(samples, drawn.samples(batch) or [])
                or (len(parts) > 1 and sum(counts) != len(samples or range(sum(counts))))
                or not (is_same or are_parts(own, sizes, batch, dim))
            ):
                return f"step {step} of epoch {epoch} is {own} instead of {batch}"
            if numbers != other_numbers:
                return f"after step {step} of epoch {epoch}, the random numbers differ"
    return None


def test_replicas_read_what_one_device_reads() -> None:
    failures, num_refused = [], 0
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_INPUTS):
        drawn = RandomInput.drawn(seed)
        try:
            what = difference(drawn)
        except UnsupportedError:
            num_refused += 1
            continue
        if what is not None:
            failures.append(f"{drawn}: {what}")
    assert not failures, "\n".join(failures)
    # Only batches that can be read in two ways are refused.
    assert num_refused <= 10 + NUM_INPUTS // 5
