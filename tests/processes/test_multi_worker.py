"""What `MultiWorkerMirroredStrategy` does, on real workers: semantics of many workers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from worker_threads import communicator_of

import unisono as uo
from processes.harness import run_ranks
from processes.ports import free_port
from unisono.cluster_resolver import ClusterSpec, SimpleClusterResolver

SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN
Facts = dict[str, Any]


def cluster(port: int, size: int) -> ClusterSpec:
    # Only the first is ever listened at.
    others = [f"127.0.0.1:{number}" for number in range(1, size)]
    return ClusterSpec({"worker": [f"127.0.0.1:{port}", *others]})


def worker(
    port: int, rank: int, size: int, num_replicas: int = 1, **settings: Any
) -> uo.MultiWorkerMirroredStrategy:
    resolver = SimpleClusterResolver(cluster(port, size), task_type="worker", task_id=rank)
    devices = [f"cpu:{i}" for i in range(num_replicas)]
    options = uo.experimental.CommunicationOptions(timeout_seconds=30)
    return uo.MultiWorkerMirroredStrategy(resolver, options, devices=devices, **settings)


def context() -> uo.ReplicaContext:
    found = uo.get_replica_context()
    assert found is not None
    return found


def on_workers(size: int, facts: Callable[..., Facts], num_replicas: int = 1) -> list[Facts]:
    """Calls `facts(strategy, rank)` on every worker, and returns what each found."""
    return run_ranks(size, _on_worker, facts, free_port(), num_replicas, timeout=100)


def _on_worker(
    _: Any, rank: int, size: int, facts: Callable[..., Facts], port: int, num_replicas: int
) -> Facts:
    strategy = worker(port, rank, size, num_replicas)
    try:
        return facts(strategy, rank)
    finally:
        strategy.close()


def reductions(strategy: uo.MultiWorkerMirroredStrategy, rank: int) -> Facts:
    def on_replica() -> Facts:
        mine = context()
        value = torch.tensor(float(mine.replica_id_in_sync_group + 1))
        sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, 2), (4, 2))
        return {
            "all_reduce": mine.all_reduce(SUM, value),
            "mean": mine.all_reduce(MEAN, value),
            "all_gather": mine.all_gather(torch.full((mine.replica_id_in_sync_group + 1,), 7), 0),
            "sparse": mine.all_reduce(SUM, sparse).to_dense(),
            "integers": mine.all_reduce(MEAN, torch.tensor(mine.replica_id_in_sync_group)),
        }

    facts: Facts = {}
    for _ in range(2):
        found = strategy.run(on_replica)
        facts = {name: strategy.experimental_local_results(v)[0] for name, v in found.items()}
    facts["host tensor"] = strategy.reduce(SUM, torch.tensor(1.0))
    facts["number"] = strategy.reduce(SUM, 3.0)
    facts["axis"] = strategy.reduce(MEAN, torch.arange(2.0 + 4.0 * rank), axis=0)
    extended = strategy.extended
    facts["reduce_to"] = extended.reduce_to(SUM, torch.tensor(1.0), "cpu:0")
    pairs = [(torch.tensor(1.0), "cpu:0"), (torch.tensor(2.0), "cpu:0")]
    facts["batch"] = extended.batch_reduce_to(SUM, pairs)
    facts["gather"] = strategy.gather(torch.full((rank + 1,), rank), axis=0)
    return {name: _plain(value) for name, value in facts.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_reductions_are_over_all_workers() -> None:
    expected = {
        "all_reduce": 3.0,
        "mean": 1.5,
        "all_gather": [7, 7, 7],
        "sparse": [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
        "integers": 0.5,
        "host tensor": 2.0,
        "number": 6.0,
        "axis": 2.0,
        "reduce_to": 2.0,
        "batch": [2.0, 4.0],
        "gather": [0, 1, 1],
    }

    assert on_workers(2, reductions) == [expected, expected]


def gradients_of_collectives(strategy: uo.MultiWorkerMirroredStrategy, rank: int) -> Facts:
    def on_replica() -> tuple[torch.Tensor, torch.Tensor]:
        mine = context()
        factor = float(1 + 2 * mine.replica_id_in_sync_group)
        reduced = torch.tensor(2.0, requires_grad=True)
        (mine.all_reduce(SUM, reduced) * factor).backward()
        gathered = torch.ones(2, requires_grad=True)
        weights = factor * torch.arange(1.0, 2.0 * mine.num_replicas_in_sync + 1)
        (mine.all_gather(gathered, 0) * weights).sum().backward()
        assert reduced.grad is not None
        assert gathered.grad is not None
        return reduced.grad, gathered.grad

    reduced, gathered = strategy.run(on_replica)
    local = strategy.experimental_local_results
    return {
        "reduced": [float(one) for one in local(reduced)],
        "gathered": [one.tolist() for one in local(gathered)],
    }


@pytest.mark.parametrize(("size", "num_replicas"), [(2, 1), (2, 2), (3, 1)])
def test_gradients_flow_through_collectives(size: int, num_replicas: int) -> None:
    found = on_workers(size, gradients_of_collectives, num_replicas)

    total = size * num_replicas
    factor = float(sum(1 + 2 * i for i in range(total)))
    assert [one for facts in found for one in facts["reduced"]] == [factor] * total
    expected = [[factor * (2 * i + 1), factor * (2 * i + 2)] for i in range(total)]
    assert [one for facts in found for one in facts["gathered"]] == expected


def variables(strategy: uo.MultiWorkerMirroredStrategy, rank: int) -> Facts:
    facts: Facts = {}
    aggregation, on_read = uo.VariableAggregation, uo.VariableSynchronization.ON_READ
    with strategy.scope():
        facts["initial"] = float(uo.Variable(100.0 + rank).value())
        made = {one.name: uo.Variable(1.0, aggregation=one) for one in aggregation}
        read = {
            one.name: uo.Variable(1.0, aggregation=one, synchronization=on_read)
            for one in aggregation
            if one is not aggregation.NONE
        }
        total = uo.Variable(1.0, aggregation=aggregation.SUM)

    def add() -> None:
        for variable in (*made.values(), *read.values()):
            variable.assign_add(torch.tensor(rank + 1.0))
        total.assign_add(5.0)

    strategy.run(add)
    facts["written"] = {name: float(variable.value()) for name, variable in made.items()}
    facts["read"] = {name: float(variable.value()) for name, variable in read.items()}
    facts["constant"] = float(total.value())
    total.assign(10.0 + rank)
    facts["assigned"] = float(total.value())
    read["SUM"].assign(6.0)
    facts["shared out"] = float(read["SUM"].value())
    return facts


def test_variables_stay_in_sync_across_workers() -> None:
    first, second = on_workers(2, variables)

    assert first["initial"] == second["initial"] == 100.0
    together = {"SUM": 4.0, "MEAN": 2.5, "ONLY_FIRST_REPLICA": 2.0}
    assert first["written"] == {"NONE": 2.0, **together}
    assert second["written"] == {"NONE": 3.0, **together}
    expected = {"SUM": 5.0, "MEAN": 2.5, "ONLY_FIRST_REPLICA": 2.0}
    assert first["read"] == second["read"] == expected
    assert first["constant"] == second["constant"] == 11.0
    assert first["assigned"] == second["assigned"] == 10.0
    assert first["shared out"] == second["shared out"] == 6.0


class Net(nn.Module):
    """Has a parameter that only some workers use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, *, uses_all: bool) -> torch.Tensor:
        hidden = self.norm(self.first(x)).relu()
        if uses_all:
            hidden = self.sometimes(hidden)
        result: torch.Tensor = self.last(hidden)
        return result


def training(strategy: uo.MultiWorkerMirroredStrategy, rank: int) -> Facts:
    torch.manual_seed(rank)
    with strategy.scope():
        model = Net()
        scale = uo.Variable(torch.full((2,), 1.0 + rank))
        trained: list[Any] = [*model.parameters(), scale]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    torch.manual_seed(0)

    def step() -> torch.Tensor:
        mine = context()
        torch.manual_seed(mine.replica_id_in_sync_group)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(context().local_id))
        optimizer.zero_grad()
        uses_all = mine.replica_id_in_sync_group == 0
        loss: torch.Tensor = (scale * model(x, uses_all=uses_all)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [float(strategy.reduce(MEAN, strategy.run(step))) for _ in range(4)]
    sometimes, never = model.sometimes.weight.grad, model.never.weight.grad
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    state["scale"] = scale.state().numpy()
    return {"losses": losses, "has": [sometimes is not None, never is not None], "state": state}


@pytest.mark.parametrize(("size", "num_replicas"), [(2, 1), (2, 2), (3, 1)])
def test_workers_train_as_one(size: int, num_replicas: int) -> None:
    first, *others = on_workers(size, training, num_replicas)

    assert first["losses"][-1] < first["losses"][0]
    assert first["has"] == [True, False]
    for other in others:
        assert other["losses"] == first["losses"]
        assert other["has"] == first["has"]
        for name, value in first["state"].items():
            assert np.array_equal(other["state"][name], value), name


def saving(strategy: uo.MultiWorkerMirroredStrategy, rank: int) -> Facts:
    """The chief saves and evaluates, while the others go on."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(context().local_id + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    saved: list[Any] = []
    for _ in range(3):
        strategy.run(step)
        if strategy.is_chief:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            saved.append(torch.load(io.BytesIO(file.getvalue())))
            model.eval()
            strategy.run(lambda: model(torch.ones(2, 3)))
            model.train()
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    return {"state": state, "saved": [one["1.running_mean"].numpy() for one in saved]}


def test_the_chief_alone_saves_and_evaluates_a_model_with_statistics() -> None:
    first, second = on_workers(2, saving, num_replicas=2)

    for name, value in first["state"].items():
        assert np.array_equal(second["state"][name], value), name
    assert second["saved"] == []
    assert np.array_equal(first["saved"][-1], first["state"]["1.running_mean"])
    assert not np.array_equal(first["saved"][0], first["saved"][1])
    assert first["state"]["1.num_batches_tracked"] == 3


def properties(strategy: uo.MultiWorkerMirroredStrategy, rank: int) -> Facts:
    config = strategy.update_config_proto(uo.contrib.ConfigProto())
    extended = strategy.extended
    strategy.check_health()
    # Who has closed is lost to those that still ask.
    communicator_of(strategy).barrier()
    return {
        "in sync": strategy.num_replicas_in_sync,
        "chief": strategy.is_chief,
        "checkpoint": extended.should_checkpoint,
        "summary": extended.should_save_summary,
        "leader": config.collective_group_leader,
        "filters": config.device_filters,
        "timeout": config.timeout_seconds,
        "ids": strategy.experimental_local_results(
            strategy.run(lambda: context().replica_id_in_sync_group)
        ),
        "task": (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id),
    }


def test_every_worker_knows_its_place() -> None:
    found = on_workers(3, properties, 2)

    for rank, facts in enumerate(found):
        assert facts == {
            "in sync": 6,
            "chief": rank == 0,
            "checkpoint": rank == 0,
            "summary": rank == 0,
            "leader": "/job:worker/replica:0/task:0",
            "filters": [f"/job:worker/task:{rank}"],
            "timeout": 30,
            "ids": (2 * rank, 2 * rank + 1),
            "task": ("worker", rank),
        }


def _configured(_: Any, rank: int, size: int, port: int, other_port: int) -> Facts:
    strategy = uo.contrib.CollectiveAllReduceStrategy()
    alone = strategy.num_replicas_in_sync
    spec = {"worker": [f"127.0.0.1:{port}", f"127.0.0.1:{other_port}"]}
    leader = "/job:worker/replica:0/task:1"
    config = uo.contrib.ConfigProto(collective_group_leader=leader, timeout_seconds=20)
    strategy.configure(config, spec, "worker", rank)
    total = float(strategy.reduce(SUM, torch.tensor(rank + 1.0)))
    strategy.close()
    filters, timeout = config.device_filters, strategy.extended.options.timeout_seconds
    return {"alone": alone, "total": total, "filters": filters, "timeout": timeout}


def test_configure_turns_the_older_strategy_into_one_of_many_workers() -> None:
    found = run_ranks(2, _configured, free_port(), free_port())

    for rank, facts in enumerate(found):
        filters = [f"/job:worker/task:{rank}"]
        assert facts == {"alone": 1, "total": 3.0, "filters": filters, "timeout": 20}


def _joins_again(_: Any, rank: int, size: int, port: int) -> list[float]:
    totals = []
    for _ in range(3):
        strategy = worker(port, rank, size)
        totals.append(float(strategy.reduce(SUM, torch.tensor(rank + 1.0))))
        strategy.close()
    return totals


def test_a_process_can_join_a_job_again() -> None:
    assert run_ranks(2, _joins_again, free_port()) == [[3.0] * 3] * 2


@pytest.mark.parametrize("bytes_per_pack", [1, 1 << 10])
def test_small_packs_give_the_same_bits_as_large_ones(bytes_per_pack: int) -> None:
    port = free_port()
    small = run_ranks(2, _packed, free_port(), bytes_per_pack)
    large = run_ranks(2, _packed, port, 0)

    for one, other in zip(small, large, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _packed(_: Any, rank: int, size: int, port: int, bytes_per_pack: int) -> list[Any]:
    resolver = SimpleClusterResolver(cluster(port, size), task_type="worker", task_id=rank)
    options = uo.experimental.CommunicationOptions(bytes_per_pack, timeout_seconds=30)
    strategy = uo.MultiWorkerMirroredStrategy(resolver, options, devices=["cpu:0"])
    torch.manual_seed(0)
    with strategy.scope():
        layers = [nn.Linear(8, 8, dtype=torch.float64 if i == 2 else None) for i in range(5)]
        optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()])

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(4, 8)
        for layer in layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        x.square().sum().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    strategy.close()
    return [p.detach().numpy() for layer in layers for p in layer.parameters()]
