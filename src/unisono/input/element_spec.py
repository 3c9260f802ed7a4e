"""What the elements of a distributed dataset look like, before one is drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from unisono.errors import UnsupportedError
from unisono.input.loaders import LoaderSource
from unisono.input.random_state import random_state, set_random_state
from unisono.input.source import Source
from unisono.input.sources import IterableSource
from unisono.input.structure import take_apart
from unisono.values import as_tensor


class TensorSpec(NamedTuple):
    """What is known of a tensor of the input.

    Attributes:
        shape: Its shape, with None where the size may differ from step to step.
        dtype: Its dtype.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype


def specs_of(source: Source, batch_size: int | None) -> tuple[Any, list[Any]]:
    """Returns the structure of a batch and a spec for each of its leaves, in order.

    One sample is read for it, with the random generators set back afterwards.

    Args:
        source: What gives the batches.
        batch_size: The size of what a replica gets, if that is always the same.
    """
    before = random_state(())
    try:
        tree, leaves = take_apart(_example(source))
    finally:
        set_random_state(before, ())
    return tree, [_spec(leaf, batch_size) for leaf in leaves]


def _spec(leaf: Any, batch_size: int | None) -> Any:
    if not isinstance(leaf, (Tensor, np.ndarray)):
        return type(leaf)
    tensor = as_tensor(leaf)
    return TensorSpec((batch_size, *tensor.shape[1:])[: tensor.dim()], tensor.dtype)


def _example(source: Source) -> Any:
    """Returns a batch, or one like it of a single sample, and leaves the source as it is."""
    if isinstance(source, LoaderSource):
        loader = source.loader
        dataset = loader.dataset
        first = next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]
        collate: Any = loader.collate_fn
        return collate(first if loader.batch_sampler is None else [first])
    if isinstance(source, IterableSource):
        return next(source.open())
    raise UnsupportedError(
        "This input gives its batches once, so `element_spec` cannot look at one. Take the first "
        "element, and read the shapes and dtypes of its tensors."
    )
