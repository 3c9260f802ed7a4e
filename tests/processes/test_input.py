"""Input on many workers: no sample is lost or seen twice, and all end together."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch._C._distributed_c10d import Store
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

import unisono as uo
from processes.harness import run_ranks, strategy_of
from processes.ports import free_ports
from unisono.input.distributed_input import DistributedInput

FILE_SIZES = 3, 8, 1, 5, 11


class Step(NamedTuple):
    """What one worker got in one step: samples by replica, and what was said about all."""

    samples: list[list[int]]
    counts: tuple[int, ...] | None
    dtype: str


class Kind(NamedTuple):
    """A way to give input to workers.

    Attributes:
        make: Makes it, given a strategy and which worker this is.
        samples: Says what samples there are in all, by the number of workers.
    """

    make: Callable[[uo.Strategy, int], DistributedInput]
    samples: Callable[[int], Iterable[int]]


def numbers(start: int, stop: int) -> Dataset[Any]:
    return TensorDataset(torch.arange(start, stop))


def own_numbers(rank: int) -> range:
    return range(100 * rank, 100 * rank + 4 + 5 * rank)


def numbers_of_all(num_workers: int) -> Iterable[int]:
    return itertools.chain.from_iterable(map(own_numbers, range(num_workers)))


def shared(strategy: uo.Strategy, rank: int) -> DistributedInput:
    loader = DataLoader(numbers(0, 37), batch_size=10, shuffle=True)
    return strategy.experimental_distribute_dataset(loader)


def by_file(strategy: uo.Strategy, rank: int) -> DistributedInput:
    ends = itertools.accumulate(FILE_SIZES, initial=0)
    files: ConcatDataset[Any] = ConcatDataset([numbers(*pair) for pair in itertools.pairwise(ends)])
    loader = DataLoader(files, batch_size=7, shuffle=True)
    options = uo.InputOptions(auto_shard_policy=uo.AutoShardPolicy.FILE)
    return strategy.experimental_distribute_dataset(loader, options)


def not_sharded(strategy: uo.Strategy, rank: int) -> DistributedInput:
    own = own_numbers(rank)
    loader = DataLoader(numbers(own.start, own.stop), batch_size=6, shuffle=True)
    options = uo.InputOptions(auto_shard_policy=uo.AutoShardPolicy.OFF)
    return strategy.experimental_distribute_dataset(loader, options)


def by_function(strategy: uo.Strategy, rank: int) -> DistributedInput:
    def make(context: uo.InputContext) -> Any:
        own = own_numbers(context.input_pipeline_id)
        return DataLoader(numbers(own.start, own.stop), batch_size=2, shuffle=True)

    return strategy.distribute_datasets_from_function(make)


def for_the_last_alone(strategy: uo.Strategy, rank: int) -> DistributedInput:
    """The other workers never get a batch."""

    def make(context: uo.InputContext) -> Any:
        is_last = context.input_pipeline_id == context.num_input_pipelines - 1
        return [(part,) for part in torch.arange(5).split(2)] if is_last else []

    return strategy.distribute_datasets_from_function(make)


KINDS = {
    "shared": Kind(shared, lambda _: range(37)),
    "by file": Kind(by_file, lambda _: range(sum(FILE_SIZES))),
    "not sharded": Kind(not_sharded, numbers_of_all),
    "by function": Kind(by_function, numbers_of_all),
    "for the last alone": Kind(for_the_last_alone, lambda _: range(5)),
}
LAYOUTS = [(2, 1), (2, 2), (3, 1), (3, 2)]


def seen(strategy: uo.Strategy, element: Any) -> Step:
    (value,) = element
    own = value.counts[strategy.extended.first_replica_id :]
    # A replica without samples has one that counts nothing.
    samples = [part.tolist() if n else [] for part, n in zip(value.values, own, strict=False)]
    return Step(samples, value.counts, str({part.dtype for part in value.values}))


def copied(state: Any) -> Any:
    """What comes back of a state that was written to a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(strategy: uo.Strategy, rank: int, kind: Kind, *, by_chief: bool) -> list[list[Step]]:
    """The steps of a pass, put together from what was seen before and after some of them."""
    start = torch.get_rng_state()
    length = len(list(kind.make(strategy, rank)))
    put_together = []
    for num_steps in sorted({1, 2, 3, length} & {*range(length + 1)}):
        torch.set_rng_state(start)
        dataset = kind.make(strategy, rank)
        before = [seen(strategy, element) for element in itertools.islice(dataset, num_steps)]
        state = copied(dataset.state_dict())
        if by_chief:
            state = strategy.extended.workers.gather_objects(state)[0]
        # A new process would be somewhere else.
        torch.manual_seed(1000 + rank)
        another = kind.make(strategy, rank)
        another.load_state_dict(state)
        put_together.append(before + [seen(strategy, element) for element in another])
    return put_together


def read(
    store: Store, rank: int, size: int, num_replicas: int, ports: list[int]
) -> dict[str, dict[str, Any]]:
    strategy = strategy_of(rank, ports, num_replicas)
    try:
        results = {}
        for name, kind in KINDS.items():
            torch.manual_seed(rank)
            dataset = kind.make(strategy, rank)
            results[name] = {
                "passes": [[seen(strategy, element) for element in dataset] for _ in range(2)],
                "resumed by all": resumed(strategy, rank, kind, by_chief=False),
                "resumed by the chief": resumed(strategy, rank, kind, by_chief=True),
            }
        return results
    finally:
        strategy.close()


Found = list[dict[str, dict[str, Any]]]


@pytest.mark.parametrize(("num_workers", "num_replicas"), LAYOUTS)
def test_every_kind_of_input_on_real_workers(num_workers: int, num_replicas: int) -> None:
    """One test for each layout, whose workers are started once."""
    found = run_ranks(num_workers, read, num_replicas, free_ports(num_workers), timeout=200)

    for kind in KINDS:
        for number in range(2):
            no_sample_is_lost_or_doubled(found, kind, number)
        workers_end_together_and_know_what_all_got(found, kind)
        for how in ("resumed by all", "resumed by the chief"):
            a_pass_that_is_resumed_anywhere_goes_on_as_it_would(found, kind, how)
        # Of three workers, one may have a single sample.
        if num_workers == 2 and kind != "for the last alone":
            shuffled_passes_differ(found, kind)


def no_sample_is_lost_or_doubled(found: Found, kind: str, number: int) -> None:
    workers = [result[kind]["passes"][number] for result in found]

    samples = [s for steps in workers for step in steps for part in step.samples for s in part]

    assert sorted(samples) == sorted(KINDS[kind].samples(len(found)))


def workers_end_together_and_know_what_all_got(found: Found, kind: str) -> None:
    workers = [result[kind]["passes"][0] for result in found]

    for steps in zip(*workers, strict=True):
        sizes = tuple(len(part) for step in steps for part in step.samples)
        assert {step.counts for step in steps} == {sizes}
        assert sum(sizes) > 0
        assert {step.dtype for step in steps} == {"{torch.int64}"}


def a_pass_that_is_resumed_anywhere_goes_on_as_it_would(found: Found, kind: str, how: str) -> None:
    for result in found:
        *put_together, at_the_end = result[kind][how]

        assert len(put_together) > 0
        assert put_together == [at_the_end] * len(put_together)


def shuffled_passes_differ(found: Found, kind: str) -> None:
    for result in found:
        first, second = result[kind]["passes"]
        assert first != second
