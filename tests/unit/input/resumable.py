"""Inputs of every kind that can be resumed, with random numbers in their samples."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from unisono.devices import cpu_slots
from unisono.input import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    InputContext,
    InputOptions,
)
from unisono.input.distributed_input import DistributedInput


class Noisy(Dataset[Tensor]):
    """Each sample is its index and a random number, as random transforms make them."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        self.fetched.append(index)
        return torch.tensor([index, torch.rand(()).item()])


class Shuffled(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(11))
        random.shuffle(order)
        return (torch.tensor([i, torch.rand(()).item()]) for i in order)


class Passes:
    """An iterable of shuffled batches."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.from_numpy(np.random.permutation(11)).split(2)


class PythonShuffle(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        order = list(range(11))
        random.shuffle(order)
        return iter(order)


def loader(dataset: Any = None, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Noisy(), batch_size=2, **settings)


def split_over_two(source: Any, buffer_size: int = 1) -> DistributedDataset:
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)
    return DistributedDataset(source, cpu_slots(2), options)


def from_function(source: Any) -> DistributedDatasetsFromFunction:
    return DistributedDatasetsFromFunction(lambda _: source, InputContext(1, 0, 2), cpu_slots(2))


MAKERS: dict[str, Callable[[], DistributedInput]] = {
    "in order": lambda: split_over_two(loader()),
    "shuffled": lambda: split_over_two(loader(shuffle=True)),
    "own generator": lambda: split_over_two(
        loader(shuffle=True, generator=torch.Generator().manual_seed(5))
    ),
    "sampler's generator": lambda: split_over_two(
        loader(sampler=RandomSampler(range(11), generator=torch.Generator().manual_seed(5)))
    ),
    "weighted": lambda: split_over_two(loader(sampler=WeightedRandomSampler([1.0] * 11, 11))),
    "own sampler": lambda: split_over_two(loader(sampler=PythonShuffle())),
    "workers": lambda: split_over_two(loader(shuffle=True, num_workers=2)),
    "workers, own generator": lambda: split_over_two(
        loader(shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(5))
    ),
    "iterable": lambda: split_over_two(loader(Shuffled())),
    "iterable, workers": lambda: split_over_two(loader(Shuffled(), num_workers=2)),
    "any iterable": lambda: split_over_two(Passes()),
    "read ahead": lambda: split_over_two(Passes(), buffer_size=3),
    "from function": lambda: from_function(loader(shuffle=True)),
}
