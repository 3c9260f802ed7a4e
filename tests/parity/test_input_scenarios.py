"""Input, dealt as TensorFlow deals it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from scenarios import PR, Scenario, check, each, shown
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader
from worker_threads import on_workers

import unisono as uo
from unisono.devices import cpu_slots
from unisono.errors import EndOfInputError, UnsupportedError
from unisono.input import DistributedDataset, DistributedDatasetsFromFunction
from unisono.input.split.splitter import rotated_sizes, tensorflow_sizes
from unisono.workers import ConnectedWorkers

AUTO, OFF, FILE = (
    uo.InputOptions(auto_shard_policy=policy, split="tensorflow")
    for policy in (uo.AutoShardPolicy.AUTO, uo.AutoShardPolicy.OFF, uo.AutoShardPolicy.FILE)
)


def batches(num_samples: int, batch_size: int, num_passes: int = 1) -> list[Tensor]:
    return [*torch.arange(num_samples).split(batch_size)] * num_passes


def dropping(num_samples: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(
        torch.arange(num_samples),  # type: ignore[arg-type]
        batch_size=batch_size,
        drop_last=True,
    )


def steps(dataset: Iterable[Any]) -> list[Any]:
    return [shown(element).values for element in dataset]


def dealt(source: Any) -> Callable[[uo.Strategy], Any]:
    return lambda strategy: steps(strategy.experimental_distribute_dataset(source, AUTO))


def without_sharding(source: Any) -> Callable[[uo.Strategy], Any]:
    """With sizes that are fixed, as for files."""
    return lambda strategy: steps(strategy.experimental_distribute_dataset(source, OFF))


def from_function(make: Callable[[], Any]) -> Callable[[uo.Strategy], Any]:
    return lambda strategy: steps(
        strategy.distribute_datasets_from_function(lambda _: make(), AUTO)
    )


def counting(strategy: uo.Strategy) -> Any:
    numbers = itertools.count(1)
    iterator = strategy.make_input_fn_iterator(lambda _: lambda: next(numbers))
    return [iterator.get_next(), iterator.get_next()]


def context_of(workers: ConnectedWorkers, num_replicas: int) -> uo.InputContext:
    rank, size = workers.communicator.rank, workers.communicator.size
    return uo.InputContext(size, rank, size * num_replicas)


def by_two_workers(
    num_replicas: int, source: Any, options: uo.InputOptions = AUTO
) -> Callable[[Any], Any]:
    def on_one(workers: ConnectedWorkers) -> list[Any]:
        context = context_of(workers, num_replicas)
        dataset = DistributedDataset(
            source, cpu_slots(num_replicas), options, input_context=context, workers=workers
        )
        return steps(dataset)

    return lambda _: on_workers(2, on_one)


def functions_of_two_workers(make: Callable[[uo.InputContext], Any]) -> list[list[Any]]:
    def on_one(workers: ConnectedWorkers) -> list[Any]:
        context = context_of(workers, 1)
        dataset = DistributedDatasetsFromFunction(
            make, context, cpu_slots(1), AUTO, workers=workers
        )
        return steps(dataset)

    return on_workers(2, on_one)


def first_sums(_: uo.Strategy) -> list[int]:
    def make(context: uo.InputContext) -> Any:
        size = context.get_per_replica_batch_size(10)
        return batches(100, size)[context.input_pipeline_id :: context.num_input_pipelines]

    return [sum(first[0]) for first, *_ in functions_of_two_workers(make)]


def of_uneven_lengths(_: uo.Strategy) -> Any:
    return functions_of_two_workers(lambda context: batches([2, 5][context.input_pipeline_id], 2))


def files(num_files: int) -> Callable[[Any], Any]:
    numbers = torch.arange(6 * num_files).split(6)
    loader: DataLoader[Any] = DataLoader(ConcatDataset(numbers), batch_size=4)
    return by_two_workers(1, loader, FILE)


def arrays(strategy: uo.Strategy) -> Any:
    rows = strategy.experimental_make_numpy_dataset(torch.arange(6).numpy())
    loader: DataLoader[Any] = DataLoader(rows, batch_size=6)
    iterator = strategy.make_dataset_iterator([*loader, *loader])
    seen = [iterator.get_next(), iterator.get_next()]
    try:
        iterator.get_next()
    except EndOfInputError:
        seen.append("the end")
    return seen


HALVES = [[0, 1], [2, 3]], [[4, 5], [6, 7]]
FULL = [[0, 1, 2, 3], [4, 5, 6, 7]]
SIX = PR([[0, 1, 2], [3, 4, 5]])

SCENARIOS = [
    Scenario(118, "8 by 4", dealt(batches(8, 4)), [*HALVES]),
    Scenario(119, "6 by 4", dealt(batches(6, 4)), [HALVES[0], [[4], [5]]]),
    Scenario(120, "13 by 8", dealt(batches(13, 8)), [FULL, [[8, 9, 10], [11, 12]]]),
    Scenario(121, "9 by 8", dealt(batches(9, 8)), [FULL, [[8], []]]),
    Scenario(122, "4 over 5", dealt(batches(4, 4)), [[[0], [1], [2], [3], []]], 5),
    Scenario(123, "8 by 4 over 3", dealt(batches(8, 4)), [[*half, []] for half in HALVES], 3),
    Scenario(
        123,
        "8 by 4 over 3, fixed",
        without_sharding(batches(8, 4)),
        [[[0, 1], [2], [3]], [[4, 5], [6], [7]]],
        3,
    ),
    Scenario(124, "10 by 5", dealt(dropping(10, 5)), [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]]]),
    Scenario(125, "14 by 8, dropping", dealt(dropping(14, 8)), [FULL]),
    Scenario(
        126, "14 by 8, fixed", without_sharding(batches(14, 8)), [FULL, [[8, 9, 10, 11], [12, 13]]]
    ),
    Scenario(127, "3 by 2 twice", dealt(batches(3, 2, 2)), [[[0], [1]], [[2], []]] * 2),
    Scenario(
        128,
        "from a function",
        from_function(lambda: [*torch.arange(10)]),
        [[i, i + 1] for i in range(0, 10, 2)],
    ),
    Scenario(129, "an odd tail", from_function(lambda: [*torch.arange(5)]), [[0, 1], [2, 3]]),
    Scenario(130, "an odd batch", from_function(lambda: batches(6, 2)), [HALVES[0], [[4, 5], []]]),
    Scenario(130, "dropping", from_function(lambda: dropping(6, 2)), [HALVES[0]]),
    Scenario(131, "a callable", counting, [PR([1, 2]), PR([3, 4])]),
    Scenario(
        132,
        "5 over 2",
        lambda s: uo.InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(5),
        ValueError,
    ),
    Scenario(
        133,
        "13 by 8 over 4",
        lambda s: [tensorflow_sizes(len(batch), 4) for batch in batches(13, 8)],
        [(2, 2, 2, 2), (2, 2, 1, 0)],
    ),
    Scenario(
        134,
        "fixed sizes",
        lambda s: [
            [rotated_sizes(size, total, first) for first in range(0, total, num_replicas)]
            for size, total, num_replicas in [(7, 4, 2), (5, 3, 1), (1, 4, 2)]
        ],
        [
            [(2, 2, 2, 1), (2, 1, 2, 2)],
            [(2, 2, 1), (2, 1, 2), (1, 2, 2)],
            [(1, 0, 0, 0), (0, 0, 1, 0)],
        ],
    ),
    Scenario(
        135,
        "two workers",
        by_two_workers(1, batches(14, 8)),
        [[[[0, 1, 2, 3]], [[8, 9, 10]]], [[[4, 5, 6, 7]], [[11, 12, 13]]]],
    ),
    # TensorFlow gives the second sub-batch to the other worker. Here each replica gets what it
    # would get on one worker, so that the result does not depend on how many there are.
    Scenario(
        136,
        "two workers of two",
        by_two_workers(2, batches(16, 8)),
        [
            # TensorFlow deals parts 0 and 2 to worker 0. Here each replica gets what it would get
            # in one worker of four.
            [[[0, 1], [2, 3]], [[8, 9], [10, 11]]],
            [[[4, 5], [6, 7]], [[12, 13], [14, 15]]],
        ],
    ),
    Scenario(
        137,
        "files of two workers",
        files(2),
        [[[[0, 1]], [[2, 3]], [[4, 5]]], [[[6, 7]], [[8, 9]], [[10, 11]]]],
    ),
    Scenario(138, "one file for two workers", files(1), UnsupportedError),
    Scenario(139, "a shard a worker", first_sums, [10, 35]),
    Scenario(140, "arrays", arrays, [SIX, SIX, "the end"]),
    Scenario(
        151,
        "an odd tail of two workers",
        by_two_workers(1, batches(9, 4)),
        [[[[0, 1]], [[4, 5]], [[8]]], [[[2, 3]], [[6, 7]], [[]]]],
    ),
    Scenario(
        152,
        "workers of uneven lengths",
        of_uneven_lengths,
        [[[[0, 1]], [[]], [[]]], [[[0, 1]], [[2, 3]], [[4]]]],
    ),
]


@each(SCENARIOS)
def test_the_answer_is_that_of_tensorflow_or_better(
    scenario: Scenario, mirrored: Callable[..., uo.MirroredStrategy]
) -> None:
    check(scenario, mirrored)


def test_no_scenario_is_left_out() -> None:
    assert {one.number for one in SCENARIOS} == {*range(118, 141), 151, 152}
