"""Datasets of several workers, which are threads here."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from worker_threads import on_workers

from unisono.devices import cpu_slots
from unisono.errors import CommunicationError, UnsupportedError
from unisono.input import (
    AutoShardPolicy,
    DistributedDataset,
    DistributedDatasetsFromFunction,
    InputContext,
    InputOptions,
    counts_of,
)
from unisono.values import PerReplica, select_replica
from unisono.workers import ConnectedWorkers
from unit.input.parts import own_samples

OFF, FILE, HINT = (
    InputOptions(auto_shard_policy=policy)
    for policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE, AutoShardPolicy.HINT)
)


def context_of(workers: ConnectedWorkers, num_replicas: int = 1) -> InputContext:
    rank, size = workers.communicator.rank, workers.communicator.size
    return InputContext(size, rank, size * num_replicas)


def distributed(
    workers: ConnectedWorkers,
    source: Any,
    num_replicas: int = 1,
    options: InputOptions | None = None,
) -> DistributedDataset:
    return DistributedDataset(
        source,
        cpu_slots(num_replicas),
        options,
        input_context=context_of(workers, num_replicas),
        workers=workers,
    )


def by_rank(
    *sources: Any, num_replicas: int = 1, options: InputOptions | None = None
) -> Callable[[ConnectedWorkers], DistributedDatasetsFromFunction]:
    """Makes a dataset of each worker from what a function gives it."""

    def make(workers: ConnectedWorkers) -> DistributedDatasetsFromFunction:
        return DistributedDatasetsFromFunction(
            lambda context: sources[context.input_pipeline_id],
            context_of(workers, num_replicas),
            cpu_slots(num_replicas),
            options,
            workers=workers,
        )

    return make


def lists(dataset: Any) -> list[Any]:
    """The samples of this worker's replicas, step by step."""
    rank = getattr(dataset, "_dataset", dataset)._context.input_pipeline_id
    return [own_samples(element, rank) for element in dataset]


def batches(num_samples: int, batch_size: int) -> list[Tensor]:
    return [*torch.arange(num_samples).split(batch_size)]


class Stream(IterableDataset[int]):
    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


@dataclass
class Pair:
    image: Any
    name: Any


@pytest.mark.parametrize("options", [OFF, HINT], ids=["OFF", "HINT"])
def test_without_sharding_each_worker_deals_its_batches_over_as_many_steps(
    options: InputOptions,
) -> None:
    first, second = on_workers(2, lambda w: lists(distributed(w, batches(10, 7), 2, options)))

    assert first == [[[0, 1], [2, 3]], [[4, 5], [6]], [[7], [8]], [[9], []]]
    assert second == [[[0, 1], [2]], [[3, 4], [5, 6]], [[7], []], [[8], [9]]]

    options = dataclasses.replace(options, split="tensorflow")
    first, second = on_workers(2, lambda w: lists(distributed(w, batches(10, 7), 2, options)))

    assert first == [[[0, 1], [2, 3]], [[4, 5], [6]], [[7, 8], [9]]]
    assert second == [[[0, 1], [2]], [[3, 4], [5, 6]], [[7, 8], [9]]]


@pytest.mark.parametrize("buffer_size", [0, 1, 3])
@pytest.mark.parametrize("split", ["even", "tensorflow"])
def test_a_worker_that_is_done_gets_batches_of_its_own_kind_that_count_nothing(
    split: str, buffer_size: int
) -> None:
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size, split=split)
    num_lent = 1 if split == "even" else 0
    make = by_rank(
        [{"x": torch.ones(2, 3, dtype=torch.float16), "name": ["a", "b"], "scale": 4}],
        [{"x": torch.ones(1, 3, dtype=torch.float16), "name": ["c"], "scale": 5}] * 3,
        options=options,
    )

    first, second = on_workers(2, lambda workers: [list(make(workers)), list(make(workers))][1])

    assert len(first) == len(second) == 3
    for element in first[1:]:
        (x,) = element["x"].values
        assert (x.shape, x.dtype) == ((num_lent, 3), torch.float16)
        assert element["name"].values == (["a"][:num_lent],)
        assert element["scale"].values == (4,)
        assert counts_of(element) == (0, 1)


@pytest.mark.parametrize(("options", "is_read_ahead"), [(InputOptions(), False), (OFF, True)])
def test_workers_that_read_the_same_draw_at_the_same_point_of_the_program(
    options: InputOptions, is_read_ahead: bool
) -> None:
    """On another thread they would draw other random numbers each, and so shuffle differently."""
    options = dataclasses.replace(options, experimental_per_replica_buffer_size=2)

    class Drawn:
        def __init__(self) -> None:
            self.threads: set[int] = set()

        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(4):
                self.threads.add(threading.get_ident())
                yield torch.arange(4)

    def draws_elsewhere(workers: ConnectedWorkers) -> bool:
        source = Drawn()
        list(distributed(workers, source, options=options))
        return source.threads != {threading.get_ident()}

    assert on_workers(2, draws_elsewhere) == [is_read_ahead] * 2


def test_a_worker_that_never_had_a_batch_is_shown_one() -> None:
    made = Pair(torch.arange(6).view(3, 2), ["a", "b", "c"])

    first, second = on_workers(2, lambda w: list(by_rank([], [made] * 2, num_replicas=2)(w)))

    assert len(first) == len(second) == 1
    for part in (select_replica(i, first[0]) for i in range(2)):
        assert isinstance(part, Pair)
        assert (part.image.shape, part.image.dtype, part.name) == ((1, 2), torch.int64, ["a"])
    assert counts_of(first[0]) == counts_of(second[0]) == (0, 0, 3, 3)


def test_elements_that_cannot_be_empty_end_for_all_with_the_first() -> None:
    numbers = [*torch.arange(5)]
    make = by_rank(numbers[:2], numbers, options=InputOptions(split="tensorflow"))

    assert on_workers(2, lambda w: lists(make(w))) == [[[0], [1]]] * 2


def test_elements_without_a_batch_dimension_are_dealt_until_nobody_has_any() -> None:
    numbers = [*torch.arange(5)]

    first, second = on_workers(2, lambda w: lists(by_rank(numbers[:2], numbers)(w)))

    assert first == [[0], [1], [[]], [[]], [[]]]
    assert second == [[0], [1], [2], [3], [4]]


def test_a_loader_that_drops_its_rest_does_not_make_others_drop_theirs() -> None:
    def loader(num_samples: int) -> DataLoader[Any]:
        return DataLoader(
            TensorDataset(torch.arange(num_samples)),
            batch_size=2,
            drop_last=True,
            collate_fn=lambda rows: torch.stack([number for (number,) in rows]),
        )

    first, second = on_workers(2, lambda w: lists(by_rank(loader(3), loader(7))(w)))

    assert first == [[[0, 1]], [[]], [[]]]
    assert second == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_batches_whose_leaves_disagree_on_the_samples_count_as_one_each() -> None:
    batch = (torch.zeros(6), torch.zeros(2))

    def ask(workers: ConnectedWorkers) -> Any:
        elements = by_rank([batch], [batch, batch])(workers)
        return [value.counts for element in elements for value in element]

    assert on_workers(2, ask) == [[(1, 1), (1, 1), (0, 1), (0, 1)]] * 2


def test_what_one_worker_cannot_read_is_raised_on_all_and_the_next_step_comes() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Tensor]:
            return self

        def __init__(self) -> None:
            self.count = 0

        def __next__(self) -> Tensor:
            self.count += 1
            if self.count == 2:
                raise OSError("the disk is gone")
            if self.count == 4:
                raise StopIteration
            return torch.tensor([self.count])

    def ask(workers: ConnectedWorkers) -> Any:
        is_broken = workers.communicator.rank == 1
        iterator = iter(by_rank(batches(3, 1), Broken() if is_broken else [])(workers))
        first = next(iterator).values[0].tolist()
        kind = OSError if is_broken else CommunicationError
        with pytest.raises(kind, match="the disk is gone") as raised:
            next(iterator)
        assert is_broken or raised.value.ranks == (1,)  # type: ignore[attr-defined]
        return first, lists(iterator)

    assert on_workers(2, ask) == [([0], [[[2]]]), ([1], [[[3]]])]


def test_what_is_dealt_says_how_many_samples_all_workers_got() -> None:
    def ask(workers: ConnectedWorkers) -> Any:
        iterator = iter(distributed(workers, batches(13, 8), 2))
        return [(counts_of(element), iterator.last_counts) for element in iterator]

    assert on_workers(2, ask) == [[((2, 2, 2, 2),) * 2, ((2, 1, 1, 1),) * 2]] * 2


def test_what_input_says_counts_before_what_can_be_measured() -> None:
    dealt = PerReplica.placed((torch.zeros(2),), cpu_slots(1), (2, 1))
    made = PerReplica([torch.zeros(7)])

    assert counts_of((dealt, made)) == (2, 1)
    assert counts_of((made,)) == (7,)


def test_batches_that_were_split_in_other_proportions_are_refused() -> None:
    def placed(*counts: int, is_input: bool = True) -> PerReplica:
        return PerReplica.placed((torch.zeros(1),), cpu_slots(1), counts, is_input=is_input)

    assert counts_of((placed(2, 4), placed(1, 2))) == (2, 4)
    assert counts_of((placed(2, 4), placed(1, 1, is_input=False))) == (2, 4)
    assert counts_of((placed(3, 1, is_input=False), 5)) == (3, 1)
    with pytest.raises(UnsupportedError, match=r"got \(2, 1\) samples of one batch and \(3, 1\)"):
        counts_of((placed(2, 1), placed(3, 1)))


def test_workers_take_over_the_random_generators_of_the_chief() -> None:
    def ask(workers: ConnectedWorkers) -> Any:
        own = torch.Generator().manual_seed(workers.communicator.rank)
        numbers: Any = range(20)
        loader = DataLoader(numbers, batch_size=4, shuffle=True, generator=own)
        return lists(distributed(workers, loader))

    first, second, third = on_workers(3, ask)

    samples = [sample for step in zip(first, second, third, strict=True) for sample in step]
    assert sorted(i for parts in samples for part in parts for i in part) == [*range(20)]


def test_data_that_all_read_alike_can_be_resumed_by_other_workers() -> None:
    numbers: Any = range(24)

    def loader() -> DataLoader[Any]:
        # These workers are threads, which share the global random generators.
        return DataLoader(numbers, batch_size=6, shuffle=True, generator=torch.Generator())

    iterator = iter(DistributedDataset(loader(), cpu_slots(1)))
    next(iterator)
    state = iterator.state_dict()
    rest = [element.tolist() for element in iterator]

    def ask(workers: ConnectedWorkers) -> Any:
        dataset = distributed(workers, loader())
        dataset.load_state_dict(state)
        return lists(dataset)

    by_worker = on_workers(3, ask)

    joined = [[i for (part,) in step for i in part] for step in zip(*by_worker, strict=True)]
    assert joined == rest


@pytest.mark.parametrize(
    ("then", "now", "problem"),
    [
        ((2, "function"), (3, "function"), "2 workers .* this job has 3"),
        ((2, "function"), (2, "shared"), "2 workers .* all workers read the same"),
        ((2, "off"), (3, "off"), "2 steps per batch, but this one makes 3"),
        ((1, "off"), (2, "off"), "1 steps per batch, but this one makes 2"),
    ],
)
def test_a_state_of_other_readers_is_refused(
    then: tuple[int, str], now: tuple[int, str], problem: str
) -> None:
    def make(workers: ConnectedWorkers, kind: str) -> Any:
        if kind == "function":
            return by_rank(*[batches(4, 1)] * 3)(workers)
        return distributed(workers, batches(8, 2), 1, OFF if kind == "off" else None)

    def save(workers: ConnectedWorkers) -> Any:
        iterator = iter(make(workers, then[1]))
        next(iterator)
        return iterator.state_dict()

    def load(workers: ConnectedWorkers) -> None:
        dataset = make(workers, now[1])
        dataset.load_state_dict(states[0])
        with pytest.raises(UnsupportedError, match=problem):
            iter(dataset)

    states = on_workers(then[0], save)
    on_workers(now[0], load)


def test_nobody_knows_how_long_data_of_all_workers_is() -> None:
    def ask(workers: ConnectedWorkers) -> None:
        for dataset in (distributed(workers, batches(8, 2), 1, OFF), by_rank([], [])(workers)):
            with pytest.raises(TypeError, match="its own data"):
                len(dataset)
        assert len(distributed(workers, batches(8, 2))) == 4

    on_workers(2, ask)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_each_worker_reads_its_own_files(batch_size: int | None, shuffle: bool) -> None:
    files: list[Any] = [torch.arange(10 * i, 10 * i + 4) for i in range(5)]
    if batch_size is None:
        files = [file.view(2, 2) for file in files]
    loader: Any = DataLoader(ConcatDataset(files), batch_size=batch_size, shuffle=shuffle)

    first, second = on_workers(2, lambda workers: lists(distributed(workers, loader, 1, FILE)))

    read = [sorted(i for (part,) in worker for i in part) for worker in (first, second)]
    assert read[0] == [*range(4), *range(20, 24), *range(40, 44)]
    assert read[1] == [*range(10, 14), *range(30, 34)]


def test_files_may_be_streams() -> None:
    loader: Any = DataLoader(ChainDataset([Stream(0, 1), Stream(2), Stream(3, 4)]), batch_size=4)

    first, second = on_workers(2, lambda workers: lists(distributed(workers, loader, 1, FILE)))

    assert first == [[[0, 1]], [[3, 4]]]
    assert second == [[[]], [[2]]]


def test_one_worker_reads_any_input_as_files() -> None:
    assert lists(DistributedDataset(batches(6, 4), cpu_slots(2), FILE)) == [
        [[0, 1], [2, 3]],
        [[4], [5]],
    ]


FILE_OF_3: Any = range(3)
TWO_FILES: ConcatDataset[int] = ConcatDataset([FILE_OF_3, FILE_OF_3])


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ([torch.arange(4)], "got a list"),
        (DataLoader(FILE_OF_3), "got a range"),
        (DataLoader(ConcatDataset([FILE_OF_3])), "each of the 2 workers .* only 1"),
        (DataLoader(TWO_FILES, sampler=SubsetRandomSampler([1])), "SubsetRandomSampler"),
        (DataLoader(TWO_FILES, sampler=RandomSampler(TWO_FILES, num_samples=2)), "RandomSampler"),
        (DataLoader(TWO_FILES, batch_sampler=[[0, 1], [2]]), "not with a list"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_has_no_files_for_each_worker_is_refused(source: Any, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        DistributedDataset(source, cpu_slots(1), FILE, input_context=InputContext(2, 0, 2))


def test_a_policy_for_what_a_function_shares_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="must be AUTO here, got FILE"):
        DistributedDatasetsFromFunction(lambda _: [], InputContext(), cpu_slots(1), FILE)


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="OFF, AUTO, FILE, DATA, HINT of `AutoShardPolicy`, got 'FILE'"
    ):
        InputOptions(auto_shard_policy="FILE")  # type: ignore[arg-type]
