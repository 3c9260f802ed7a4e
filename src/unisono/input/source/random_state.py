"""The random generators that a source draws from: read, and set back to replay what they gave."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

from unisono.errors import UnsupportedError

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


def check_random_states(name: str, states: Any) -> None:
    """Raises unless `states`, which a saved state calls `name`, are states of random generators."""
    try:
        if not isinstance(states, (list, tuple)):
            raise TypeError("no tuple")
        for state in states:
            # On generators of nobody, so that nothing is set by halves.
            _set(state, torch.Generator(), random.Random(), np.random.RandomState())
            for own in state["generators"]:
                if own.dtype != torch.uint8 or own.dim() != 1:
                    raise TypeError(f"the state of a generator is {own.dtype}, {own.dim()}-d")
    except Exception as error:
        raise UnsupportedError(
            f"The saved input state is damaged: `{name}` does not hold the states of random "
            f"generators ({type(error).__name__}: {error}). Load what `state_dict()` returned."
        ) from error


def _set(state: RandomState, for_torch: Any, for_python: Any, for_numpy: Any) -> None:
    for_torch.set_state(state["torch"])
    version, keys, gauss = state["python"]
    for_python.setstate((version, tuple(keys), gauss))
    kind, words, *rest = state["numpy"]
    for_numpy.set_state((kind, words.numpy().astype(np.uint32), *rest))


@contextmanager
def replayed(state: RandomState, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Runs the block from `state`, and then sets the global generators back to where they were."""
    before = random_state(())
    try:
        set_random_state(state, generators)
        yield
    finally:
        set_random_state(before, ())


def set_random_state(state: RandomState, generators: Sequence[torch.Generator]) -> None:
    """Sets the global generators of the host, and `generators`, to where they were."""
    _set(state, torch.default_generator, random, np.random)
    for generator, own in zip(generators, state["generators"], strict=True):
        try:
            generator.set_state(own)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedError(
                f"A random generator on {generator.device} cannot be set to the saved state: "
                f"{error}. Resume with the same dataset and samplers."
            ) from error
