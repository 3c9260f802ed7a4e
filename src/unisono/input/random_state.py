"""The random generators that a source draws from: read, and set back to replay what they gave."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

# Only what `torch.save` writes and `torch.load(weights_only=True)` reads.
RandomState: TypeAlias = dict[str, Any]


def random_state(generators: Sequence[torch.Generator]) -> RandomState:
    """Returns where the global generators of the host, and `generators`, are."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "generators": [generator.get_state() for generator in generators],
    }


@contextmanager
def replayed(state: RandomState, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Runs the block from `state`, and then sets the global generators back to where they were.

    `generators` belong to the source and stay where the block leaves them.
    """
    before = random_state(())
    set_random_state(state, generators)
    try:
        yield
    finally:
        set_random_state(before, ())


def set_random_state(state: RandomState, generators: Sequence[torch.Generator]) -> None:
    """Sets the global generators of the host, and `generators`, to where they were."""
    torch.set_rng_state(state["torch"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    for generator, own in zip(generators, state["generators"], strict=True):
        generator.set_state(own)
