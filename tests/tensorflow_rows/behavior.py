"""Rows of what is different."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from on_replica import replica_id as own_id
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from worker_threads import on_strategies

import unisono as uo
from tensorflow_rows.table import (
    kept,
    pair,
    plain,
    pr,
    row,
)

DIFFERENT = "What is different"


@row(DIFFERENT, "replicas run one after another")
def _() -> None:
    import threading

    barrier = threading.Barrier(2, timeout=10)
    pair().run(barrier.wait)
    order: list[int] = []

    def step() -> None:
        order.extend([own_id()] * 3)

    pair(serial=True).run(step)
    assert order == [0] * 3 + [1] * 3


@row(DIFFERENT, "an error on replica 0")
def _() -> None:
    ended: list[int] = []

    def step() -> None:
        if own_id() == 0:
            raise LookupError
        for _ in range(10**9):
            pass
        ended.append(own_id())

    with pytest.raises(LookupError):
        pair().run(step)
    assert ended == []


@row(DIFFERENT, "another structure on one replica")
def _() -> None:
    strategy = pair()
    with pytest.raises(ValueError, match="Replica 1 returned"):
        strategy.run(lambda: [1] * own_id())
    with pytest.raises(ValueError, match="its sum over replicas has no meaning"):
        strategy.reduce("SUM", uo.Mirrored([torch.ones(1)] * 2))
    with pytest.raises(ValueError, match="has none for replica 1"):
        strategy.run(lambda x: x, (pr(1),))


@row(DIFFERENT, "`reduce` to the current device")
def _() -> None:
    strategy = kept(uo.MirroredStrategy(["cpu:1", "cpu:0"]))
    assert strategy.extended.host == uo.Device("cpu", 1)
    assert strategy.reduce("SUM", pr(1, 2)).item() == 3


@row(DIFFERENT, "`run` makes a variable")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(1.0)
    found = strategy.run(lambda: variable.values[own_id()])
    assert type(found) is uo.PerReplica
    assert strategy.extended.value_container(found.values[1]) is variable


@row(DIFFERENT, "components of a variable have names")
def _() -> None:
    assert uo.Variable(1.0, name="z").name == "z"


@row(DIFFERENT, "an optimizer updates each component")
def _() -> None:
    strategy, steps = pair(), []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            return super().step(closure)

    with strategy.scope():
        variable = uo.Variable(1.0)
        parameters: Any = [variable]
        optimizer = Counted(parameters, lr=1.0)

    def step() -> None:
        (variable * 1.0).backward()
        optimizer.step()

    strategy.run(step)
    assert [plain(part.detach()) for part in variable.values] == [0, 0]
    assert len(steps) == 1


@row(DIFFERENT, "worker devices of the default strategy")
def _() -> None:
    default = uo.get_strategy()
    assert default.extended.worker_devices == (uo.Device("cpu", 0),)
    assert copy.deepcopy(default) is not default


@row(DIFFERENT, "a `PerReplica` of `tf.IndexedSlices`")
def _() -> None:
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match=r"Call `\.to_dense\(\)` first"):
        pair().gather(uo.PerReplica([sparse, sparse]), axis=0)


def read(num_replicas: int, source: Callable[[], Any], **options: Any) -> list[Any]:
    """What each of two workers gets of `source`, step by step."""

    def elements(strategy: uo.Strategy) -> Any:
        given = uo.InputOptions(**options)
        dataset = strategy.experimental_distribute_dataset(source(), given)
        return [plain(x) for (x,) in dataset]

    return on_strategies(2, elements, num_replicas=num_replicas)


def loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **options)


def counts(num_samples: int, **options: Any) -> Any:
    given = [torch.ones(num_samples)]
    (x,) = pair(3).experimental_distribute_dataset(given, uo.InputOptions(**options))
    return x.counts, [len(part) for part in x.values]


@row(DIFFERENT, "4 samples over 3 replicas")
def _() -> None:
    assert counts(4) == ((2, 1, 1), [2, 1, 1])
    assert counts(4, split="tensorflow") == ((2, 2, 0), [2, 2, 0])


@row(DIFFERENT, "a replica without samples")
def _() -> None:
    assert counts(2) == ((1, 1, 0), [1, 1, 1])
    assert counts(2, split="tensorflow") == ((1, 1, 0), [1, 1, 0])


@row(DIFFERENT, '`strategy.reduce("MEAN", losses)`')
def _() -> None:
    for size, split, mean in ((4, "even", 1.5), (2, "even", 0.5), (4, "tensorflow", 1.5)):
        strategy = pair(3)
        batch, options = torch.arange(float(size)), uo.InputOptions(split=split)
        (x,) = strategy.experimental_distribute_dataset([batch], options)
        assert strategy.reduce("MEAN", strategy.run(torch.mean, args=(x,))).item() == mean


@row(DIFFERENT, "`dataset.with_options`")
@row(DIFFERENT, "FILE shares the files that a pipeline reads")
def _() -> None:
    files: Any = ConcatDataset([TensorDataset(torch.arange(2) + 10 * i) for i in range(2)])
    policy = uo.AutoShardPolicy.FILE
    found = read(1, lambda: loader(files, batch_size=2), auto_shard_policy=policy)
    assert found == [[[[0]], [[1]]], [[[10]], [[11]]]]
    by_default = read(1, lambda: loader(files, batch_size=2))
    assert by_default == [[[[0]], [[10]]], [[[1]], [[11]]]]


@row(DIFFERENT, "with DATA worker 0 of 2")
def _() -> None:
    dataset = TensorDataset(torch.arange(4))
    policy = uo.AutoShardPolicy.DATA
    found = read(2, lambda: loader(dataset, batch_size=4), auto_shard_policy=policy)
    assert found == [[[[0], [1]]], [[[2], [3]]]]


@row(DIFFERENT, "with DATA each worker shuffles")
def _() -> None:
    dataset = TensorDataset(torch.arange(8))
    seeds = iter(range(10))

    def shuffled() -> Any:
        generator = torch.Generator().manual_seed(next(seeds))
        return loader(dataset, batch_size=4, shuffle=True, generator=generator)

    found = read(1, shuffled)
    samples = [x for worker in found for step in worker for part in step for x in part]
    assert sorted(samples) == list(range(8))


@row(DIFFERENT, "`session_config` of a strategy")
def _() -> None:
    strategy = pair()
    strategy.configure(session_config={"a": 1})
    assert len(strategy.experimental_make_numpy_dataset(np.arange(3), session="s")) == 3
