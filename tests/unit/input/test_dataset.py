import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
)

from unisono.devices import cpu_slots
from unisono.errors import UnsupportedError
from unisono.input import (
    AutoShardPolicy,
    DistributedDataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    counts_of,
    numpy_dataset,
)
from unit.input.parts import own_samples

# From Python 3.12 on, starting workers by fork warns once torch has its own threads.
# Without a GPU, torch says that there is nothing to pin memory for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


WITHOUT_SHARDING = InputOptions(auto_shard_policy=AutoShardPolicy.OFF)


class Numbers(Dataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Each worker gives every other number."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        worker: Any = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.num_samples, step))


class Backwards(Sampler[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples - 1, -1, -1))


class Batches:
    """An iterable of batches of the numbers below `num_samples`, over and over."""

    def __init__(self, num_samples: int, batch_size: int, num_passes: int = 1) -> None:
        self.arguments = num_samples, batch_size
        self.num_passes = num_passes

    def __iter__(self) -> Iterator[Tensor]:
        num_samples, batch_size = self.arguments
        for _ in range(self.num_passes):
            yield from torch.arange(num_samples).split(batch_size)


class Chunks(Batches, IterableDataset[Tensor]):
    """The same as a dataset that makes its own batches."""


def distributed(source: Any, num_replicas: int, **settings: Any) -> DistributedDataset:
    return DistributedDataset(source, cpu_slots(num_replicas), **settings)


def lists(dataset: Iterable[Any]) -> list[list[list[int]]]:
    """The samples that each replica got, step by step."""
    return [own_samples(element) for element in dataset]


def samples(dataset: Iterable[Any]) -> list[int]:
    return [sample for step in lists(dataset) for part in step for sample in part]


@pytest.mark.parametrize(
    ("source", "num_replicas", "steps"),
    [
        (Batches(8, 4), 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (Batches(6, 4), 2, [[[0, 1], [2, 3]], [[4], [5]]]),
        (Batches(13, 8), 2, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10], [11, 12]]]),
        (Batches(9, 8), 2, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8], []]]),
        (Batches(4, 4), 5, [[[0], [1], [2], [3], []]]),
        (Batches(8, 4), 3, [[[0, 1], [2], [3]], [[4, 5], [6], [7]]]),
        (Batches(6, 6), 4, [[[0, 1], [2, 3], [4], [5]]]),
        (Batches(10, 5), 2, [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]]]),
        (Batches(3, 2, 2), 2, [[[0], [1]], [[2], []], [[0], [1]], [[2], []]]),
    ],
)
def test_a_batch_is_split_in_shares_that_differ_by_one(
    source: Any, num_replicas: int, steps: list[Any]
) -> None:
    assert lists(distributed(source, num_replicas)) == steps


@pytest.mark.parametrize(
    ("source", "num_replicas", "steps"),
    [
        (Batches(9, 8), 2, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8], []]]),
        (Batches(8, 4), 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (Batches(6, 6), 4, [[[0, 1], [2, 3], [4, 5], []]]),
    ],
)
def test_tensorflow_splits_in_rounded_up_shares_and_leaves_parts_empty(
    source: Any, num_replicas: int, steps: list[Any]
) -> None:
    dataset = distributed(source, num_replicas, options=InputOptions(split="tensorflow"))

    assert [[part.tolist() for part in element.values] for element in dataset] == steps


def test_a_replica_without_samples_gets_a_copy_of_one() -> None:
    batch = torch.arange(2)

    (element,) = distributed([batch], 3)

    assert element.counts == (1, 1, 0)
    assert [part.tolist() for part in element.values] == [[0], [1], [0]]
    element.values[2].add_(5)
    assert batch.tolist() == [0, 1]


def test_a_batch_without_any_sample_is_empty_on_all_replicas() -> None:
    (element,) = distributed([torch.zeros(0, 3)], 2)

    assert [tuple(part.shape) for part in element.values] == [(0, 3), (0, 3)]


def test_a_loader_that_drops_its_last_batch_gives_only_full_ones() -> None:
    loader = DataLoader(Numbers(14), batch_size=8, drop_last=True)

    assert lists(distributed(loader, 2)) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


@pytest.mark.parametrize(
    ("source", "num_replicas", "last"),
    [
        (Batches(14, 8), 2, [[8, 9, 10, 11], [12, 13]]),
        (Batches(8, 4), 3, [[4, 5], [6], [7]]),
        (DataLoader(Numbers(6), batch_size=8), 2, [[0, 1, 2, 3], [4, 5]]),
    ],
)
def test_without_sharding_tensorflow_fixes_the_sizes_and_fills_them_in_order(
    source: Any, num_replicas: int, last: list[list[int]]
) -> None:
    options = dataclasses.replace(WITHOUT_SHARDING, split="tensorflow")
    dataset = distributed(source, num_replicas, options=options)

    assert lists(dataset)[-1] == last


def test_fixed_sizes_grow_with_a_batch_that_is_larger_than_the_first() -> None:
    source = [torch.arange(2), torch.arange(5)]

    dataset = distributed(source, 2, options=WITHOUT_SHARDING)

    assert lists(dataset) == [[[0], [1]], [[0, 1, 2], [3, 4]]]


def test_one_replica_gets_bare_batches() -> None:
    elements = list(distributed(Batches(5, 3), 1))

    assert [element.tolist() for element in elements] == [[0, 1, 2], [3, 4]]


def test_the_parts_are_on_the_devices_of_the_replicas() -> None:
    (element,) = distributed([torch.arange(2)], 2)

    assert element.devices == cpu_slots(2)


def test_workers_share_a_batch_and_wrap_even_one_replica() -> None:
    context = InputContext(2, 1, 2)

    dataset = distributed(Batches(14, 8), 1, input_context=context)

    assert [own_samples(element, 1) for element in dataset] == [[[4, 5, 6, 7]], [[11, 12, 13]]]


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(torch.arange(11).split(4)),
    "generator": lambda: (batch for batch in torch.arange(11).split(4)),
    "arrays": lambda: np.array_split(np.arange(11), 3),
    "map-style": lambda: DataLoader(Numbers(11), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(11), batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(Numbers(11), batch_size=4, shuffle=True, num_workers=2),
    "iterable": lambda: DataLoader(Stream(11), batch_size=4),
    "iterable-workers": lambda: DataLoader(Stream(11), batch_size=4, num_workers=2),
    "collate": lambda: DataLoader(
        Numbers(11), batch_size=4, collate_fn=lambda batch: default_collate(batch).to(torch.int16)
    ),
    "sampler": lambda: DataLoader(Numbers(11), batch_size=4, sampler=Backwards(11)),
    "batch-sampler": lambda: DataLoader(Numbers(11), batch_sampler=[[10, 0, 5], [*range(1, 5)]]),
    "unbatched": lambda: DataLoader(Chunks(11, 4), batch_size=None),
    "pinned": lambda: DataLoader(Numbers(11), batch_size=4, pin_memory=True),
}
LACKS = {"batch-sampler": {6, 7, 8, 9}}


@pytest.mark.parametrize("buffer_size", [0, 1, 3])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_each_sample_once(kind: str, buffer_size: int) -> None:
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)

    dealt = samples(distributed(SOURCES[kind](), 3, options=options))

    assert sorted(dealt) == sorted(set(range(11)) - LACKS.get(kind, set()))


@pytest.mark.parametrize("buffer_size", [0, 1, 3])
@pytest.mark.parametrize("kind", ["shuffled", "workers", "iterable-workers", "sampler"])
def test_the_order_is_that_of_plain_iteration(kind: str, buffer_size: int) -> None:
    torch.manual_seed(3)
    plain = torch.cat(list(SOURCES[kind]())).tolist()
    after = torch.rand(1)
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)

    torch.manual_seed(3)
    dealt = samples(distributed(SOURCES[kind](), 2, options=options))

    assert dealt == plain
    assert torch.equal(torch.rand(1), after)


@given(st.integers(0, 40), st.integers(1, 12), st.integers(2, 6), st.booleans())
def test_no_sample_is_lost_or_doubled(
    num_samples: int, batch_size: int, num_replicas: int, is_fixed: bool
) -> None:
    options = WITHOUT_SHARDING if is_fixed else None
    source = TensorDataset(torch.arange(num_samples))
    loader = DataLoader(
        source, batch_size, collate_fn=lambda rows: torch.stack([r for (r,) in rows])
    )
    iterator = iter(distributed(loader, num_replicas, options=options))

    seen: list[int] = []
    for element in iterator:
        assert counts_of(element) == iterator.last_counts
        assert sum(iterator.last_counts) <= batch_size
        seen += [sample for part in own_samples(element) for sample in part]

    assert seen == list(range(num_samples))


def test_a_second_pass_starts_over() -> None:
    dataset = distributed(Batches(5, 4), 2)

    assert lists(dataset) == lists(dataset) == [[[0, 1], [2, 3]], [[4], []]]


def test_two_passes_can_be_under_way_at_once() -> None:
    dataset = distributed(DataLoader(Numbers(4), batch_size=2), 2)

    both = [[a.values[0].item(), b.values[0].item()] for a, b in zip(dataset, dataset, strict=True)]

    assert both == [[0, 0], [2, 2]]


def test_workers_that_persist_serve_pass_after_pass_even_an_abandoned_one() -> None:
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=2, persistent_workers=True)
    dataset = distributed(loader, 2)
    abandoned = iter(dataset)
    next(abandoned)

    assert samples(dataset) == list(range(8))
    assert samples(dataset) == list(range(8))
    assert next(abandoned, None) is None


def test_a_generator_is_used_up_by_one_pass() -> None:
    dataset = distributed((torch.arange(2) for _ in range(2)), 2)
    assert len(lists(dataset)) == 2

    with pytest.raises(UnsupportedError, match="a generator, which gives its batches only once"):
        iter(dataset)


def test_the_length_is_that_of_the_source() -> None:
    assert len(distributed(DataLoader(Numbers(11), batch_size=4), 2)) == 3
    assert len(distributed([torch.arange(2)] * 5, 2)) == 5
    with pytest.raises(TypeError):
        len(distributed(iter([torch.arange(2)]), 2))


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (Numbers(3), "single samples.* Wrap it in `DataLoader"),
        (TensorDataset(torch.arange(3)), "single samples.* Wrap it in `DataLoader"),
        (Stream(3), r"`DataLoader\(dataset, batch_size=None\)` if it gives whole batches"),
        (torch.arange(3), r"`DataLoader\(TensorDataset"),
        ((np.zeros(3), np.zeros(3)), "make it a list"),
        ({"x": torch.arange(3)}, "iterable of batches, got"),
        ("text", "iterable of batches, got 'text'"),
        (3, "iterable of batches, got 3"),
        (None, "iterable of batches, got None"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_gives_no_batches_is_refused_with_advice(wrong: Any, advice: str) -> None:
    with pytest.raises(UnsupportedError, match=advice):
        distributed(wrong, 2)


def test_a_distributed_dataset_is_not_distributed_again() -> None:
    with pytest.raises(UnsupportedError, match="already"):
        distributed(distributed([], 2), 2)


def test_a_dataset_a_replica_takes_a_function() -> None:
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)

    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        distributed([], 2, options=options)


def test_rows_of_arrays_come_in_steps_and_again_in_the_next_pass() -> None:
    dataset = numpy_dataset(np.arange(12.0).reshape(6, 2))
    distributed_rows = distributed(DataLoader(dataset, batch_size=6), 2)

    first, second = (list(distributed_rows) for _ in range(2))

    assert len(first) == len(second) == 1
    for element in first[0], second[0]:
        assert torch.cat(element.values).flatten().tolist() == list(range(12))


def test_arrays_keep_their_structure_and_their_memory() -> None:
    x = np.zeros((4, 2))
    dataset = numpy_dataset({"x": x, "y": (np.arange(4),)})
    x[3] = 7

    assert dataset[3]["x"].tolist() == [7, 7]
    assert dataset[3]["y"][0].item() == 3
    assert len(dataset) == 4


@pytest.mark.parametrize("wrong", [(np.zeros(3), np.zeros(4)), np.array(1.0), {}], ids=str)
def test_arrays_of_one_dataset_have_one_number_of_rows(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match="same number of rows"):
        numpy_dataset(wrong)
