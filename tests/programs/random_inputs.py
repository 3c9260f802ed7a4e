"""Random inputs: a `DataLoader` or a list of batches, some epochs of it, and a checkpoint amid one.

An input is read twice: as a plain program does it, and over the replicas of a strategy.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

import unisono as uo
from unisono.input.distributed_input import DistributedInput
from unisono.values import select_replica


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    x: Any
    y: Any


def _row(i: int) -> Tensor:
    return torch.arange(3.0) + 10 * i


SAMPLES: dict[str, Callable[[int], Any]] = {
    "row": _row,
    "int": lambda i: i,
    "array": lambda i: np.arange(3) + 10 * i,
    "text": lambda i: f"text {i}",
    "texts": lambda i: [f"a{i}", f"b{i}"],
    "pair": lambda i: (_row(i), i),
    "dict": lambda i: {"x": _row(i), "y": i, "name": f"text {i}"},
    "named": lambda i: Pair(_row(i), {"y": torch.tensor(i)}),
    "nested": lambda i: ({"a": _row(i), "b": [_row(i), _row(i + 1)]}, (i, f"text {i}")),
    "image": lambda i: torch.full((3, 2, 2), float(i)),
    "ragged": lambda i: torch.full((i % 4 + 1,), float(i)),
    "record": lambda i: Record(_row(i), torch.tensor(i)),
    "optional": lambda i: (_row(i), None if i % 3 else f"text {i}"),
    "bfloat16": lambda i: torch.full((2,), float(i), dtype=torch.bfloat16),
}
_NOT_STACKED = ("ragged", "record", "optional")


def columns(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


def with_numbers(batch: list[Any]) -> Any:
    return {"samples": batch, "numbers": torch.arange(len(batch)), "size": len(batch)}


def stacked_second(batch: list[Tensor]) -> Any:
    return torch.stack(batch, 1)


class Numbered(Dataset[Any]):
    def __init__(self, kind: str, size: int, *, has_noise: bool) -> None:
        self.kind, self.size, self.has_noise = kind, size, has_noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        noise = torch.rand(()) if self.has_noise and self.kind == "row" else 0
        sample = SAMPLES[self.kind](i)
        return sample + noise if isinstance(sample, Tensor) else sample


class Stream(IterableDataset[Any]):
    """Samples in an order that is drawn from Python's generator."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.size))
        random.shuffle(order)
        return map(SAMPLES[self.kind], order)


@dataclass(frozen=True)
class RandomInput:
    """What is read, and how.

    Attributes:
        limits: After how many steps each epoch is left; None reads all of it.
        save_at: The epoch and the step before which the input is saved and resumed.
        resumed_replicas: The number of replicas from then on.
    """

    seed: int
    source: str
    kind: str
    size: int
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    sampler: str
    drop_last: bool
    has_generator: bool
    has_noise: bool
    options: dict[str, Any]
    num_replicas: int
    limits: tuple[int | None, ...]
    save_at: tuple[int, int]
    resumed_replicas: int

    @classmethod
    def drawn(cls, seed: int) -> RandomInput:
        draw = random.Random(seed)
        kind, options = draw.choice(list(SAMPLES)), {}
        collates: list[Any] = [list, with_numbers]
        if kind in ("pair", "optional"):
            collates.append(columns)
        if kind not in _NOT_STACKED:
            collates += [None] * 4
        if kind == "row":
            collates.append(stacked_second)
        collate = draw.choice(collates)
        if collate is stacked_second:
            options["batch_dim"] = 1
        return cls(
            seed=seed,
            source=draw.choice(["map", "map", "map", "files", "stream", "list"]),
            kind=kind,
            size=draw.choice([2, 3, 4, 5, 7, 8, 11, 13, 20]),
            batch_size=draw.choice([1, 2, 3, 4, 5, 6, 8, 9]),
            collate=collate,
            sampler=draw.choice(list(SAMPLERS)),
            drop_last=draw.random() < 0.2,
            has_generator=draw.random() < 0.4,
            has_noise=draw.random() < 0.3,
            options=options,
            num_replicas=draw.randint(1, 5),
            limits=tuple(draw.choice([None, None, 0, 1, 2]) for _ in range(draw.randint(1, 3))),
            save_at=(draw.randint(0, 3), draw.randint(0, 3)),
            resumed_replicas=draw.randint(1, 5),
        )

    def make(self, *, is_plain: bool = False) -> Any:
        """Returns the iterable of batches. A plain program has no `DistributedSampler`."""
        collate = self.collate or default_collate
        if self.source == "list":
            samples = [SAMPLES[self.kind](i) for i in range(self.size)]
            starts = range(0, self.size, self.batch_size)
            return [collate(samples[i : i + self.batch_size]) for i in starts]
        settings: dict[str, Any] = {"collate_fn": self.collate}
        settings |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
        generator = torch.Generator().manual_seed(self.seed) if self.has_generator else None
        settings["generator"] = generator
        dataset: Any = Numbered(self.kind, self.size, has_noise=self.has_noise)
        if self.source == "stream":
            return DataLoader(Stream(self.kind, self.size), **settings)
        if self.source == "files":
            dataset = ConcatDataset([dataset, Numbered(self.kind, 2, has_noise=False)])
        if self.sampler == "batches":
            del settings["batch_size"], settings["drop_last"]
            order = RandomSampler(dataset, generator=generator)
            settings["batch_sampler"] = BatchSampler(order, self.batch_size, self.drop_last)
        elif self.sampler == "distributed":
            count, rank = (1, 0) if is_plain else (3, 1)
            settings["sampler"] = DistributedSampler(dataset, count, rank, seed=3)
        else:
            settings["sampler"] = SAMPLERS[self.sampler](dataset, generator)
        return DataLoader(dataset, **settings)

    def samples(self, batch: Any) -> list[Any] | None:
        """Returns the samples of a batch, if that is certain: a list may also be one of fields."""
        if self.collate is with_numbers:
            return list(batch["samples"])
        if self.collate in (list, columns) and self.source != "list":
            return batch if self.collate is list else list(zip(*batch, strict=True))
        return None

    def read(self) -> list[list[Any]]:
        """Reads all epochs as a plain program. Returns batches, each with random numbers."""
        _set_seeds(self.seed)
        batches = self.make(is_plain=True)
        epochs = []
        for limit in self.limits:
            iterator = iter(batches)
            steps: list[Any] = []
            while limit is None or len(steps) < limit:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                steps.append((batch, _numbers()))
            epochs.append(steps)
        return epochs

    def read_distributed(self) -> list[list[Any]]:
        """Reads all epochs over replicas. Returns their parts and counts, with random numbers."""
        _set_seeds(self.seed)
        num_replicas = self.num_replicas
        dataset = self._distributed(num_replicas)
        epochs = []
        for number, limit in enumerate(self.limits):
            iterator = iter(dataset)
            steps: list[Any] = []
            while limit is None or len(steps) < limit:
                if self.save_at == (number, len(steps)):
                    state, before = copy.deepcopy(dataset.state_dict()), _random_state()
                    num_replicas = self.resumed_replicas
                    dataset = self._distributed(num_replicas)
                    dataset.load_state_dict(state)
                    _set_random_state(before)
                    iterator = iter(dataset)
                element = iterator.get_next_as_optional()
                if not element.has_value():
                    break
                parts = [select_replica(i, element.get_value()) for i in range(num_replicas)]
                steps.append((parts, iterator.last_counts, _numbers()))
            epochs.append(steps)
        return epochs

    def _distributed(self, num_replicas: int) -> DistributedInput:
        strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        options = uo.InputOptions(**self.options)
        with_input = strategy.experimental_distribute_dataset(self.make(), options)
        strategy.close()
        return with_input


SAMPLERS: dict[str, Callable[[Any, torch.Generator | None], Any]] = {
    "in order": lambda dataset, generator: None,
    "shuffled": lambda dataset, generator: RandomSampler(dataset, generator=generator),
    "replaced": lambda dataset, generator: RandomSampler(
        dataset, replacement=True, num_samples=len(dataset) + 3, generator=generator
    ),
    "subset": lambda dataset, generator: SubsetRandomSampler(
        range(0, len(dataset), 2), generator=generator
    ),
    "weighted": lambda dataset, generator: WeightedRandomSampler(
        [1.0] * len(dataset), len(dataset), generator=generator
    ),
    "batches": lambda dataset, generator: None,
    "distributed": lambda dataset, generator: None,
}


def _set_seeds(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def _numbers() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def _random_state() -> tuple[Any, Any]:
    return torch.get_rng_state(), random.getstate()


def _set_random_state(state: tuple[Any, Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])


def are_parts(parts: list[Any], counts: list[int], whole: Any, dim: int) -> bool:
    """Whether the parts, which hold as many samples as `counts` say, are those of a batch."""
    if isinstance(whole, np.ndarray):
        whole = torch.as_tensor(whole)
    if isinstance(whole, Tensor) and whole.dim():
        sizes = [part.shape[dim] for part in parts]
        return sizes == counts and are_equal(torch.cat(parts, dim), whole)
    if any(type(part) is not type(whole) for part in parts):
        return False
    if type(whole) in (list, tuple):
        joined = type(whole)(one for part in parts for one in part)
        if [len(part) for part in parts] == counts and are_equal(joined, whole):
            return True
    if any(len(_children(part)) != len(_children(whole)) for part in parts):
        return False
    if not _children(whole):
        return all(are_equal(part, whole) for part in parts)
    by_child = zip(*map(_children, parts), strict=True)
    pairs = zip(by_child, _children(whole), strict=True)
    return all(are_parts(list(own), counts, child, dim) for own, child in pairs)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two batches are the same: containers, dtypes, shapes and values."""
    if isinstance(one, (Tensor, np.ndarray)):
        first, second = torch.as_tensor(one), torch.as_tensor(other)
        return first.dtype == second.dtype and torch.equal(first, second)
    if type(one) is not type(other) or len(_children(one)) != len(_children(other)):
        return False
    if not _children(one):
        return bool(one == other)
    return all(map(are_equal, _children(one), _children(other)))


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return list(value) if isinstance(value, (list, tuple)) else []
