"""Input, dealt as TensorFlow deals it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from scenarios import PR, Scenario, check, each, shown
from torch import Tensor
from torch.utils.data import DataLoader

import unisono as uo
from unisono.devices import cpu_slots
from unisono.errors import UnsupportedError
from unisono.input import (
    AutoShardPolicy,
    DistributedDataset,
    DistributedDatasetsFromFunction,
    EndOfInputError,
    fixed_sizes,
    legacy_sizes,
)

OFF, FILE = AutoShardPolicy.OFF, AutoShardPolicy.FILE


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
    return lambda strategy: steps(strategy.experimental_distribute_dataset(source))


def without_sharding(source: Any) -> Callable[[uo.Strategy], Any]:
    """With sizes that are fixed, as for files."""
    return lambda strategy: steps(
        DistributedDataset(source, strategy.extended.worker_devices, auto_shard_policy=OFF)
    )


def from_function(make: Callable[[], Any]) -> Callable[[uo.Strategy], Any]:
    return lambda strategy: steps(strategy.distribute_datasets_from_function(lambda _: make()))


def counting(strategy: uo.Strategy) -> Any:
    numbers = itertools.count(1)
    iterator = strategy.make_input_fn_iterator(lambda _: lambda: next(numbers))
    return [iterator.get_next(), iterator.get_next()]


def on_worker(worker_id: int, num_workers: int, num_replicas: int, source: Any) -> list[Any]:
    context = uo.InputContext(num_workers, worker_id, num_workers * num_replicas)
    return steps(DistributedDataset(source, cpu_slots(num_replicas), input_context=context))


def by_two_workers(num_replicas: int, source: Any) -> Callable[[Any], Any]:
    return lambda _: [on_worker(worker_id, 2, num_replicas, source) for worker_id in range(2)]


def first_sum(worker_id: int) -> int:
    def make(context: uo.InputContext) -> Any:
        size = context.get_per_replica_batch_size(10)
        return batches(100, size)[context.input_pipeline_id :: context.num_input_pipelines]

    dataset = DistributedDatasetsFromFunction(make, uo.InputContext(2, worker_id, 2), cpu_slots(1))
    return int(next(iter(dataset)).values[0].sum())


def files(strategy: uo.Strategy) -> Any:
    context = uo.InputContext(2, 0, 2)
    return DistributedDataset(
        batches(12, 4), cpu_slots(1), input_context=context, auto_shard_policy=FILE
    )


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
        lambda s: [legacy_sizes(len(batch), 4) for batch in batches(13, 8)],
        [(2, 2, 2, 2), (2, 2, 1, 0)],
    ),
    Scenario(
        134,
        "fixed sizes",
        lambda s: [
            [fixed_sizes(size, num_workers, w, num_replicas) for w in range(num_workers)]
            for size, num_workers, num_replicas in [(7, 2, 2), (5, 3, 1), (1, 2, 2)]
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
            [[[0, 1], [2, 3]], [[8, 9], [10, 11]]],
            [[[4, 5], [6, 7]], [[12, 13], [14, 15]]],
        ],
    ),
    # torch has no readers of files: what each worker reads, a function says.
    Scenario(137, "files of two workers", files, UnsupportedError),
    Scenario(138, "one file for two workers", files, UnsupportedError),
    Scenario(139, "a shard a worker", lambda s: [first_sum(0), first_sum(1)], [10, 35]),
    Scenario(140, "arrays", arrays, [SIX, SIX, "the end"]),
]


@each(SCENARIOS)
def test_the_answer_is_that_of_tensorflow_or_better(
    scenario: Scenario, mirrored: Callable[..., uo.MirroredStrategy]
) -> None:
    check(scenario, mirrored)


def test_no_scenario_is_left_out() -> None:
    assert {one.number for one in SCENARIOS} == set(range(118, 141))
