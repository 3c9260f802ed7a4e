"""The number of replicas is the program's, and workers share them in any way: the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from on_replica import replica as context
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from worker_threads import on_strategies

import unisono as uo
from unisono.devices import cpu_slots, spread
from unisono.errors import ClusterError, UnsupportedError
from unisono.reductions import dealt

Program = Callable[[uo.Strategy], list[Tensor]]


class Model(nn.Module):
    """Dense and sparse gradients, half precision, statistics, a rarely used parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.hidden = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.narrow = nn.Linear(6, 5).bfloat16()
        self.last = nn.Linear(5, 3)
        self.seldom = nn.Parameter(torch.ones(3))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.hidden(self.words(words).sum(1))).relu()
        scores: Tensor = self.last(self.narrow(hidden.bfloat16()).float())
        is_last = context().replica_id_in_sync_group + 1 == context().num_replicas_in_sync
        return scores * self.seldom if is_last else scores


@cache
def start_and_data() -> tuple[dict[str, Tensor], TensorDataset]:
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        start = Model().state_dict()
    words = torch.randint(20, (67, 5), generator=generator)
    return start, TensorDataset(words, torch.randint(3, (67,), generator=generator))


def train(strategy: uo.Strategy) -> list[Tensor]:
    """Trains on an uneven last batch; returns the weights, the statistics and what was said."""
    start, data = start_and_data()
    with strategy.scope():
        model = Model()
        model.load_state_dict(start)
        dense = [p for name, p in model.named_parameters() if name != "words.weight"]
        optimizers = [torch.optim.SGD(model.words.parameters(), lr=0.1), torch.optim.Adam(dense)]
        seen = uo.Variable(
            0.0,
            synchronization=uo.VariableSynchronization.ON_READ,
            aggregation=uo.VariableAggregation.SUM,
        )
        best = uo.Variable(0.0, aggregation=uo.VariableAggregation.MEAN)

    def step(words: Tensor, labels: Tensor) -> dict[str, Any]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(dense, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen.assign_add(loss.detach())
        best.assign(loss.detach())
        least, mean = context().all_reduce("MIN", loss.detach()), context().all_reduce("MEAN", loss)
        everything = context().all_gather(labels, axis=0)
        return {
            "loss": loss.detach(),
            "number": loss.item(),
            "id": torch.tensor(context().replica_id_in_sync_group),
            "labels": labels,
            "said": torch.stack([least, mean.detach(), everything.float().mean()]),
        }

    told: list[Tensor] = []
    batches = strategy.experimental_distribute_dataset(DataLoader(data, batch_size=24))
    for batch in batches:
        results = strategy.run(step, args=batch)
        told += [
            strategy.reduce("MEAN", results["loss"]),
            torch.as_tensor(strategy.reduce("SUM", results["number"])),
            strategy.reduce("SUM", results["id"]),
            strategy.reduce("SUM", results["labels"], axis=0),
            strategy.gather(results["labels"], 0),
            strategy.reduce("MAX", results["said"]),
        ]
    state = model.state_dict().values()
    return [one.detach().clone() for one in [*told, seen.value(), best.value(), *state]]


def bits_of(counts: Sequence[int], program: Program = train, **settings: Any) -> list[Tensor]:
    """What a program gives on all workers, which must be the same on each."""
    first, *others = on_strategies(
        len(counts), program, num_replicas=counts, threads_per_replica=1, **settings
    )
    for other in others:
        assert_same_bits(other, first)
    return first


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    differing = [
        i for i, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)
    ]
    assert not differing


@cache
def alone(num_replicas: int, **settings: Any) -> list[Tensor]:
    return bits_of([num_replicas], **settings)


LAYOUTS = [
    dealt(num_replicas, num_workers)
    for num_replicas in range(1, 9)
    for num_workers in (1, 2, 3)
    if num_workers <= num_replicas
]


@pytest.mark.parametrize("counts", [*LAYOUTS, (1, 4), (4, 1, 2), (1, 1, 3)])
def test_every_layout_has_the_bits_of_one_worker(counts: tuple[int, ...]) -> None:
    assert_same_bits(bits_of(counts), alone(sum(counts)))


@pytest.mark.parametrize(
    "settings",
    [
        {"synchronize_batch_norm": True},
        {"reduce_gradients": uo.ReduceOp.SUM},
        {"is_serial": True},
    ],
    ids=str,
)
def test_every_setting_has_the_bits_of_one_worker(settings: dict[str, Any]) -> None:
    assert_same_bits(bits_of((2, 2, 1), **settings), alone(5, **settings))
    assert_same_bits(bits_of((3, 2), **settings), alone(5, **settings))


def test_small_packs_have_the_bits_of_one_worker() -> None:
    options = uo.experimental.CommunicationOptions(bytes_per_pack=64)

    assert_same_bits(bits_of((3, 3, 2), options=options), alone(8))


def test_gradients_that_a_step_writes_have_the_bits_of_one_worker() -> None:
    def program(strategy: uo.Strategy) -> list[Tensor]:
        with strategy.scope():
            model = nn.Linear(1, 4, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            number = context().replica_id_in_sync_group
            model.weight.grad = torch.full((4, 1), 1 / (3 + number))
            optimizer.step()

        strategy.run(step)
        return [model.weight.detach().clone()]

    assert_same_bits(bits_of((3, 2), program), bits_of([5], program))


def test_replicas_have_their_numbers_and_workers_their_shares() -> None:
    def program(strategy: uo.Strategy) -> list[Any]:
        values = strategy.experimental_distribute_values_from_function(
            lambda one: (one.replica_id_in_sync_group, one.num_replicas_in_sync)
        )
        ids = strategy.run(lambda: context().replica_id_in_sync_group)
        return [
            strategy.num_replicas_in_sync,
            strategy.extended.first_replica_id,
            [one.values if isinstance(one, uo.PerReplica) else one for one in values],
            strategy.experimental_local_results(ids),
        ]

    first, second, third = on_strategies(3, program, num_replicas=(2, 2, 1))
    assert first == [5, 0, [(0, 1), (5, 5)], (0, 1)]
    assert second == [5, 2, [(2, 3), (5, 5)], (2, 3)]
    assert third == [5, 4, [(4,), (5,)], (4,)]


def test_input_functions_see_every_replica_as_a_pipeline() -> None:
    options = uo.InputOptions(experimental_replication_mode=uo.InputReplicationMode.PER_REPLICA)

    def program(strategy: uo.Strategy) -> list[Any]:
        seen: list[uo.InputContext] = []

        def dataset_fn(own: uo.InputContext) -> list[Tensor]:
            seen.append(own)
            return [torch.full((2,), own.input_pipeline_id)] * 2

        dataset = strategy.distribute_datasets_from_function(dataset_fn, options)
        steps = [strategy.gather(batch, 0).tolist() for batch in dataset]
        return [[(one.num_input_pipelines, one.input_pipeline_id) for one in seen], steps]

    for rank, (seen, steps) in enumerate(on_strategies(2, program, num_replicas=(3, 2))):
        assert seen == [(5, i) for i in ((0, 1, 2), (3, 4))[rank]]
        assert steps == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]] * 2


def test_input_functions_give_each_replica_a_batch() -> None:
    def program(strategy: uo.Strategy) -> list[Any]:
        def dataset_fn(own: uo.InputContext) -> list[Tensor]:
            return [torch.tensor([10 * own.input_pipeline_id + i]) for i in range(6)]

        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        return [strategy.gather(batch, 0).tolist() for batch in dataset]

    for steps in on_strategies(2, program, num_replicas=(3, 2)):
        assert steps == [[0, 1, 2, 10, 11], [3, 4, 5, 12, 13], [14, 15]]


def test_what_the_chief_saves_of_the_input_serves_all_workers() -> None:
    saved: list[dict[str, Any]] = []

    def dataset_of(strategy: uo.Strategy) -> Any:
        def dataset_fn(own: uo.InputContext) -> list[Tensor]:
            return [torch.tensor([10 * own.input_pipeline_id + i]) for i in range(6)]

        return strategy.distribute_datasets_from_function(dataset_fn)

    def save(strategy: uo.Strategy) -> None:
        dataset = dataset_of(strategy)
        next(iter(dataset))
        if strategy.extended.first_replica_id == 0:
            saved.append(dataset.state_dict())

    def resume(strategy: uo.Strategy) -> list[Any]:
        dataset = dataset_of(strategy)
        dataset.load_state_dict(saved[0])
        return [strategy.gather(batch, 0).tolist() for batch in dataset]

    def refuse(strategy: uo.Strategy) -> None:
        with pytest.raises(UnsupportedError, match="same numbers of replicas"):
            dataset_of(strategy).load_state_dict(saved[0])

    on_strategies(2, save, num_replicas=(3, 2))
    assert on_strategies(2, resume, num_replicas=(3, 2)) == [[[3, 4, 5, 12, 13], [14, 15]]] * 2
    on_strategies(2, refuse, num_replicas=(2, 3))
    on_strategies(2, refuse, num_replicas=(3, 3))


@pytest.mark.parametrize("split", ["even", "tensorflow"])
def test_workers_with_their_own_data_may_have_unequal_shares(split: str) -> None:
    files = [TensorDataset(torch.arange(8)), TensorDataset(torch.arange(8, 16))]
    options = uo.InputOptions(auto_shard_policy=uo.AutoShardPolicy.FILE, split=split)

    def program(strategy: uo.Strategy, num_steps: int) -> list[Any]:
        def data() -> Any:
            loader: DataLoader[Any] = DataLoader(ConcatDataset(files), batch_size=4)
            return strategy.experimental_distribute_dataset(loader, options)

        iterator = iter(data())
        steps = [strategy.gather(next(iterator)[0], 0).tolist() for _ in range(num_steps)]
        # The rest is read by another one that goes on there.
        other = data()
        other.load_state_dict(iterator.state_dict())
        steps += [strategy.gather(one, 0).tolist() for (one,) in other]
        return steps

    for num_steps in (1, 2, 4):
        (steps, same) = on_strategies(
            2, functools.partial(program, num_steps=num_steps), num_replicas=(2, 1)
        )
        assert steps == same
        assert steps == [[0, 1, 2, 8], [3, 4, 5, 9, 10], [6, 7, 11], [12], [13, 14], [15]]


def test_a_single_value_has_no_sum_on_any_worker() -> None:
    def program(strategy: uo.Strategy) -> float:
        with pytest.raises(UnsupportedError, match="single value"):
            strategy.reduce("SUM", 2.0)
        return float(strategy.reduce("MEAN", 2.0))

    assert on_strategies(2, program, num_replicas=(2, 1)) == [2.0, 2.0]


def test_results_that_replicas_share_are_reduced_on_all_workers() -> None:
    """On one worker two replicas return one object, on the other one alone returns it."""
    constant = torch.ones(())

    def program(strategy: uo.Strategy) -> list[Any]:
        result = strategy.run(lambda: {"one": constant, "number": 1, "none": None, "text": "a"})
        assert result["none"] is None
        assert result["text"] == "a"
        return [float(strategy.reduce("SUM", result[name])) for name in ("one", "number")]

    assert on_strategies(2, program, num_replicas=(2, 1)) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("op", [uo.ReduceOp.MEAN, uo.ReduceOp.SUM])
def test_hooks_give_the_mean_over_all_replicas(op: uo.ReduceOp) -> None:
    seen: list[float] = []

    def hook(state: Any, bucket: uo.hooks.GradBucket) -> Tensor:
        seen.append(bucket.buffer()[0].item())
        buffer = bucket.buffer()
        state.allreduce([buffer]).wait()
        mean: Tensor = buffer / state.size()
        return mean

    def program(strategy: uo.Strategy) -> float:
        strategy.register_comm_hook(None, hook)
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)

        def step() -> None:
            model(torch.tensor([context().replica_id_in_sync_group + 1.0])).sum().backward()

        strategy.run(step)
        assert model.weight.grad is not None
        return model.weight.grad.item()

    found = on_strategies(2, program, num_replicas=(3, 1), reduce_gradients=op)
    assert found == [2.5 if op is uo.ReduceOp.MEAN else 10.0] * 2
    # The mean of 1, 2 and 3 counts for one and a half workers, and 4 for half of one.
    assert sorted(seen) == [2.0, 3.0]


class Chain(uo.CrossDeviceOps):
    """Adds up in its own order."""

    def reduce_implementation(
        self, reduce_op: uo.ReduceOp, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        total = torch.stack(list(per_replica_value.values)).sum(0)
        if reduce_op is uo.ReduceOp.MEAN:
            total = total / len(per_replica_value.values)
        return self.broadcast_implementation(total, destinations)


def test_a_users_own_reduction_gives_the_mean_over_all_replicas() -> None:
    def program(strategy: uo.Strategy) -> list[float]:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)

        def step() -> Tensor:
            number = context().replica_id_in_sync_group + 1.0
            model(torch.tensor([number])).sum().backward()
            return torch.tensor(number)

        mean = strategy.reduce("MEAN", strategy.run(step))
        assert model.weight.grad is not None
        return [model.weight.grad.item(), mean.item()]

    assert on_strategies(2, program, num_replicas=(3, 1), make_ops=Chain) == [[2.5, 2.5]] * 2


def test_alone_a_strategy_has_the_replicas_it_asks_for() -> None:
    strategy = uo.MultiWorkerMirroredStrategy(num_replicas=3)
    try:
        assert strategy.num_replicas_in_sync == 3
        ids = strategy.run(lambda: context().replica_id_in_sync_group)
        assert strategy.experimental_local_results(ids) == (0, 1, 2)
        threads = strategy.run(torch.get_num_threads)
        assert set(strategy.experimental_local_results(threads)) == {1}
    finally:
        strategy.close()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_the_number_of_replicas_is_positive(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match="num_replicas"):
        uo.MultiWorkerMirroredStrategy(num_replicas=wrong)


def test_every_worker_needs_a_replica() -> None:
    resolver = uo.cluster_resolver.SimpleClusterResolver(
        {"worker": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]}, task_type="worker", task_id=0
    )
    with pytest.raises(ClusterError, match="at most 2 workers"):
        uo.MultiWorkerMirroredStrategy(resolver, num_replicas=2)


def test_replicas_share_devices_where_there_are_fewer() -> None:
    one, two = uo.Device("cuda", 0), uo.Device("cuda", 1)
    assert spread((one, two), 1) == (one,)
    assert list(map(str, spread((one, two), 3))) == ["cuda:0", "cuda:0#1", "cuda:1"]
    assert spread(cpu_slots(1), 3) == cpu_slots(3)
