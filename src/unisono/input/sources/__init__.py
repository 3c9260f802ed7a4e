"""Where batches come from: loaders, iterables and functions, opened again for each epoch."""

from unisono.input.sources.epoch import Epoch, Progress
from unisono.input.sources.files import of_own_files
from unisono.input.sources.kinds import FunctionSource, IterableSource, as_source
from unisono.input.sources.loaders import LoaderSource
from unisono.input.sources.random_state import random_state, set_random_state
from unisono.input.sources.readers import (
    Moving,
    MovingReaders,
    MovingReadersApart,
    Readers,
    readers_of,
)
from unisono.input.sources.samplers import check_share, of_all_samples
from unisono.input.sources.source import Source

__all__ = [
    "Epoch",
    "FunctionSource",
    "IterableSource",
    "LoaderSource",
    "Moving",
    "MovingReaders",
    "MovingReadersApart",
    "Progress",
    "Readers",
    "Source",
    "as_source",
    "check_share",
    "of_all_samples",
    "of_own_files",
    "random_state",
    "readers_of",
    "set_random_state",
]
