"""Workers that run out of batches which are lists, or hold some."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from worker_threads import on_strategies, on_workers

import unisono as uo
from unisono.devices import cpu_slots
from unisono.input import DistributedDatasetsFromFunction, InputContext
from unisono.values import select_replica
from unisono.workers import ConnectedWorkers


def parts_by_rank(*batches: Any, split: str) -> list[list[Any]]:
    """What the only replica of each worker gets, step by step."""

    def read(workers: ConnectedWorkers) -> list[Any]:
        rank, size = workers.communicator.rank, workers.communicator.size
        dataset = DistributedDatasetsFromFunction(
            lambda _: batches[rank],
            InputContext(size, rank, size),
            cpu_slots(1),
            uo.InputOptions(split=split),
            workers=workers,
        )
        return [select_replica(0, element) for element in dataset]

    return on_workers(len(batches), read)


def test_a_worker_that_is_done_gets_empty_lists_as_by_tensorflow() -> None:
    found = parts_by_rank([["a"]], [["b", "c"], ["d"], ["e"]], split="tensorflow")

    assert found == [[["a"], [], []], [["b", "c"], ["d"], ["e"]]]


def test_a_worker_that_is_done_gets_shorter_lists_of_tensors() -> None:
    def collate(images: list[Any]) -> dict[str, Any]:
        return {"images": images, "labels": torch.zeros(len(images))}

    def loader(*sizes: int) -> Any:
        images: Any = [torch.zeros(size) for size in sizes]
        return DataLoader(images, batch_size=2, collate_fn=collate)

    found, _ = parts_by_rank(loader(3, 5), loader(4, 3, 7, 6), split="even")

    assert [len(part["labels"]) for part in found] == [2, 1]
    assert [len(part["images"]) for part in found] == [2, 1]


def test_a_resumed_epoch_does_not_end_with_the_worker_that_has_only_empty_parts() -> None:
    sizes, layout = (0, 1, 1, 5), [3, 2, 2, 2]
    options = uo.InputOptions(auto_shard_policy=uo.AutoShardPolicy.OFF, split="tensorflow")

    def read(strategy: uo.Strategy) -> list[Any]:
        rank = strategy.extended.workers.rank

        def make() -> Any:
            samples: Any = list(range(sizes[rank]))
            loader = DataLoader(samples, batch_size=8, collate_fn=list)
            return strategy.experimental_distribute_dataset(loader, options)

        begun = make()
        iterator = iter(begun)
        seen = [next(iterator) for _ in range(2)]
        resumed = make()
        resumed.load_state_dict(begun.state_dict())
        return [
            sample
            for element in [*seen, *resumed]
            for replica in range(layout[rank])
            for sample in select_replica(replica, element)
        ]

    assert on_strategies(4, read, num_replicas=layout) == [[], [0], [0], [0, 1, 2, 3, 4]]
