"""What the elements of a distributed dataset look like, before one is drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from unisono.errors import UnsupportedError
from unisono.input.options import InputOptions
from unisono.input.sources.random_state import random_state, set_random_state
from unisono.input.sources.source import IterableSource, LoaderSource, Source
from unisono.input.splits.layout import lay_out
from unisono.values import Tree


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor of the input.

    Attributes:
        shape: Its shape, with None where the size may differ from step to step.
        dtype: Its dtype.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype


def specs_of(
    source: Source, options: InputOptions, batch_size: int | None
) -> tuple[Tree, list[Any]]:
    """Returns the structure of a batch and a spec for each of its leaves, in order.

    One sample is read for it, with the random generators set back afterwards.
    """
    if callable(options.split):
        raise UnsupportedError(
            "`element_spec` is not known because your `split` function makes the parts. Take the "
            "first element, and read the shapes and dtypes of its tensors."
        )
    before = random_state(())
    try:
        layout = lay_out(_example(source), options.batch_dim)
    finally:
        set_random_state(before, ())
    leaves = zip(layout.leaves, layout.dims, strict=True)
    return layout.tree, [_spec(leaf, dim, batch_size) for leaf, dim in leaves]


def _spec(leaf: Any, batch_dim: int | None, batch_size: int | None) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    shape: list[int | None] = list(leaf.shape)
    if batch_dim is not None:
        shape[batch_dim] = batch_size
    return TensorSpec(tuple(shape), leaf.dtype)


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
        "`element_spec` is not known because this input gives its batches only once. Take the "
        "first element, and read the shapes and dtypes of its tensors."
    )
