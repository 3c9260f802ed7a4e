"""Batches that are not split as the strategy splits them are refused or told of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono as uo
from unisono.errors import UnsupportedError
from unit.strategies.samples import distributed, numbers

Make = Callable[..., uo.MirroredStrategy]


def test_batches_split_in_other_proportions_are_refused_in_one_step(mirrored: Make) -> None:
    strategy = mirrored(2)
    (few,) = distributed(strategy, numbers(3))
    (many,) = distributed(strategy, numbers(8))

    with pytest.raises(UnsupportedError, match="different proportions"):
        strategy.run(lambda few, many: None, args=(few, many))


def test_batches_that_go_whole_to_each_replica_are_told_of_once(
    mirrored: Make, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = mirrored(2)

    with caplog.at_level(logging.WARNING, "unisono"):
        graph = torch.zeros(5, 2)
        for scalar in 1.0, 2.0:
            strategy.run(lambda *_: None, args=(graph, torch.tensor(scalar)))
        assert not caplog.records
        for _ in range(2):
            strategy.run(lambda *_: None, args=({"x": torch.zeros(3, 2)},))

    (record,) = caplog.records
    assert "shape (3, 2)" in record.getMessage()
    assert "experimental_distribute_dataset" in record.getMessage()


def test_a_program_that_distributes_is_told_nothing(
    mirrored: Make, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = mirrored(2)
    (x,) = distributed(strategy, numbers(4))

    with caplog.at_level(logging.WARNING, "unisono"):
        strategy.run(lambda *_: None, args=(x,))
        for _ in range(3):
            strategy.run(lambda *_: None, args=(torch.zeros(4),))

    assert not caplog.records


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_in_a_loader_loses_no_samples_and_is_told_of_once(
    mirrored: Make, shuffle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.arange(11))
    sampler: Any = DistributedSampler(data, num_replicas=4, rank=2, shuffle=shuffle, seed=3)
    whole: Any = DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle, seed=3)
    strategy = mirrored(2)
    loader = DataLoader(data, batch_size=4 + shuffle, sampler=sampler)

    with caplog.at_level(logging.WARNING, "unisono"):
        dataset = strategy.experimental_distribute_dataset(loader)
        strategy.experimental_distribute_dataset(loader)
        for epoch in range(2):
            dataset.sampler.set_epoch(epoch)
            whole.set_epoch(epoch)
            seen = [strategy.gather(x, 0).tolist() for (x,) in dataset]
            assert [i for batch in seen for i in batch] == list(whole)

    (record,) = caplog.records
    assert "part 2 of 4" in record.getMessage()
    assert f"batch size of {4 + shuffle} is the global one" in record.getMessage()


def test_a_distributed_sampler_of_another_kind_is_refused(mirrored: Make) -> None:
    class Odd(DistributedSampler[Any]):
        pass

    data = TensorDataset(torch.arange(4))
    loader = DataLoader(data, batch_size=2, sampler=Odd(data, num_replicas=2, rank=0))
    strategy = mirrored(2)

    with pytest.raises(UnsupportedError, match=r"an? Odd, which reads part 0 of 2"):
        strategy.experimental_distribute_dataset(loader)
    with pytest.raises(UnsupportedError, match="`num_replicas=1, rank=0`"):
        strategy.distribute_datasets_from_function(lambda _: loader)


def test_a_distributed_dataset_has_what_programs_ask_a_loader_for(mirrored: Make) -> None:
    data = TensorDataset(torch.arange(11))
    loader = DataLoader(data, batch_size=4, drop_last=True)
    strategy = mirrored(2)

    for dataset in (
        strategy.experimental_distribute_dataset(loader),
        strategy.distribute_datasets_from_function(lambda _: loader),
    ):
        assert len(dataset.dataset) == 11
        assert (dataset.batch_size, dataset.drop_last) == (4, True)
        assert dataset.sampler is loader.sampler
        assert dataset.batch_sampler is loader.batch_sampler
    assert len(strategy.experimental_distribute_dataset(loader)) == 2
    with pytest.raises(AttributeError, match="no attribute 'dataset'"):
        _ = strategy.experimental_distribute_dataset([torch.arange(3)]).dataset
