"""Workers of an elastic job that read for themselves: what only a lost worker had is left out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import unisono as uo
from processes.harness import Ranks, strategy_of
from processes.ports import free_ports
from processes.test_elastic import Fate, Lines

NUM_FILES, PER_FILE = 7, 10
ALL = range(NUM_FILES * PER_FILE)
# In which input and run each worker is killed.
PLAN = {3: (1, "FILE"), 2: (1, "OFF"), 1: (1, "function")}


def _files() -> list[TensorDataset]:
    return [TensorDataset(torch.arange(PER_FILE) + PER_FILE * i) for i in range(NUM_FILES)]


def _by_file(strategy: uo.Strategy, rank: int) -> Any:
    loader: DataLoader[Any] = DataLoader(ConcatDataset(_files()), 10, shuffle=True)
    options = uo.InputOptions(auto_shard_policy=uo.AutoShardPolicy.FILE)
    return strategy.experimental_distribute_dataset(loader, options)


def _own(strategy: uo.Strategy, rank: int) -> Any:
    data = TensorDataset(torch.arange(100 * rank, 100 * rank + 20 + rank))
    options = uo.InputOptions(auto_shard_policy=uo.AutoShardPolicy.OFF)
    return strategy.experimental_distribute_dataset(DataLoader(data, 10), options)


def _made(strategy: uo.Strategy, rank: int) -> Any:
    def make(context: uo.InputContext) -> DataLoader[Any]:
        own = list(ALL)[context.input_pipeline_id :: context.num_input_pipelines]
        return DataLoader(TensorDataset(torch.tensor(own)), 3)

    return strategy.distribute_datasets_from_function(make)


def _made_for_replicas(strategy: uo.Strategy, rank: int) -> Any:
    def make(context: uo.InputContext) -> DataLoader[Any]:
        own = list(ALL)[context.input_pipeline_id :: context.num_input_pipelines]
        return DataLoader(TensorDataset(torch.tensor(own)), 3)

    mode = uo.InputReplicationMode.PER_REPLICA
    return strategy.distribute_datasets_from_function(
        make, uo.InputOptions(experimental_replication_mode=mode)
    )


INPUTS = {"FILE": _by_file, "OFF": _own, "function": _made, "replicas": _made_for_replicas}


class Reader:
    """Reads an input for two epochs, and may be killed in the first."""

    def __init__(self, strategy: uo.Strategy, rank: int) -> None:
        self.strategy, self.rank = strategy, rank
        with strategy.scope():
            self.model = nn.Linear(1, 1)

    def read(self, name: str, plan: dict[int, tuple[int, str]]) -> Any:
        strategy, fate = self.strategy, Fate(self.rank, plan)
        data = INPUTS[name](strategy, self.rank)

        def step(numbers: Tensor) -> tuple[Tensor, Tensor]:
            self.model(numbers.float().view(-1, 1)).sum().backward()
            fate(name)
            return numbers.double().mean(), numbers

        epochs, fate.run = [], 0
        for _ in range(2):
            seen: list[int] = []
            for (numbers,) in data:
                mean, numbers = strategy.run(step, args=(numbers,))
                gathered = strategy.gather(numbers, axis=0)
                mean = strategy.reduce("MEAN", mean)
                assert mean.item() == pytest.approx(gathered.double().mean().item())
                seen += gathered.tolist()
                fate.run += 1
            epochs.append(seen)
        return epochs, data.num_lost_samples


def work(store: Store, rank: int, size: int, ports: list[int], plan: Any) -> Any:
    log = Lines()
    logging.getLogger("unisono").addHandler(log)
    strategy = strategy_of(rank, ports, 1, num_replicas=5, elastic=True)
    try:
        reader = Reader(strategy, rank)
        return {name: reader.read(name, plan) for name in INPUTS}, log.lines
    finally:
        strategy.close()


def test_what_only_lost_workers_had_is_left_out_named_and_counted() -> None:
    with Ranks(4, work, free_ports(4), PLAN) as ranks:
        results = ranks.results(100)
    assert sorted(results) == [0]
    found, lines = results[0]
    first, second = found["FILE"][0]
    # Worker 3 had file 3 only.
    missing = set(ALL) - set(first)
    assert len(first) == len(set(first)) == len(ALL) - found["FILE"][1]
    assert missing <= set(range(30, 40))
    assert missing
    assert sorted(second) == sorted(ALL)
    assert any("file 3 of 7" in line for line in lines)

    first, second = found["OFF"][0]
    of_all = {n for rank in range(3) for n in range(100 * rank, 100 * rank + 20 + rank)}
    assert len(first) == len(set(first)) == len(of_all) - found["OFF"][1]
    assert of_all - set(first) <= set(range(200, 300))
    assert sorted(second) == [n for n in sorted(of_all) if n < 200]

    first, second = found["function"][0]
    assert len(first) == len(set(first)) == len(ALL) - found["function"][1]
    assert found["function"][1] > 0
    assert sorted(second) == sorted(ALL)

    for seen in found["replicas"][0]:
        assert sorted(seen) == sorted(ALL)
    assert sum("samples of this step are left out" in line for line in lines) == 3
