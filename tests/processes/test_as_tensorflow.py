"""What TensorFlow does on many workers, and what its older operations do there."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import unisono as uo
from processes.harness import run_ranks
from processes.ports import free_port
from processes.test_multi_worker import context, on_workers, worker
from unisono.contrib import CrossTowerOps
from unisono.errors import UnisonoError

Facts = dict[str, Any]


def outcome(call: Any) -> str:
    """The name of the error that a call raises, and its message."""
    try:
        return f"no error but {call()!r}"
    except UnisonoError as error:
        return f"{type(error).__name__}: {error}"


def gathers(strategy: uo.MultiWorkerMirroredStrategy, rank: int) -> Facts:
    unequal = torch.ones(2, 2 + rank)
    sparse = torch.eye(2).to_sparse()
    given = {"unequal": unequal, "dimensions": torch.ones([2] * (1 + rank)), "sparse": sparse}
    facts = {name: outcome(lambda v=v: strategy.gather(v, 0)) for name, v in given.items()}
    facts["axis"] = outcome(lambda: strategy.gather(torch.ones(2), 99))
    for name, value in given.items():
        # A step that fails on all workers leaves them together.
        facts[f"{name} on replicas"] = outcome(
            lambda v=value: strategy.run(lambda: context().all_gather(v, 0))
        )
    facts["afterwards"] = strategy.gather(torch.full((rank + 1, 2), rank), 0).tolist()
    return facts


def test_what_cannot_be_gathered_is_refused_on_all_workers() -> None:
    first, second = on_workers(2, gathers)

    assert first == second
    expected = "The value must have the same shape but for dimension 0 on all 2 workers"
    for name in ("unequal", "unequal on replicas"):
        assert first[name].startswith(f"ReplicaMismatchError: {expected}")
    for name in ("dimensions", "dimensions on replicas"):
        assert first[name].startswith(
            "ReplicaMismatchError: The value must have the same number of"
        )
    for name in ("sparse", "sparse on replicas"):
        assert "UnsupportedError: The value has the layout torch.sparse_coo" in first[name]
    assert first["axis"].startswith("UnsupportedError: `axis` must be from -1 to 0")
    assert first["afterwards"] == [[0, 0], [1, 1], [1, 1]]


def inputs(strategy: uo.MultiWorkerMirroredStrategy, rank: int) -> Facts:
    def input_fn(input_context: uo.InputContext) -> Any:
        return [torch.tensor([[10.0 * input_context.input_pipeline_id]])] * 3

    def replica_fn(row: torch.Tensor) -> float:
        return row.item()

    # As the page of 1.13 writes it.
    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn)
        element = iterator.get_next()
        results = strategy.extended.call_for_each_replica(replica_fn, iterator.get_next())
    return {
        "type": type(element).__name__,
        "values": [one.tolist() for one in strategy.experimental_local_results(element)],
        "results": results,
        "spec": strategy.experimental_distribute_dataset([torch.ones(4, 3)]).element_spec.values,
    }


def test_an_element_of_one_replica_per_worker_is_distributed() -> None:
    found = on_workers(2, inputs)

    spec = (uo.TensorSpec((None, 3), torch.float32),)
    assert found == [
        {"type": "PerReplica", "values": [[[10.0 * rank]]], "results": 10.0 * rank, "spec": spec}
        for rank in range(2)
    ]


class OnWorkers(CrossTowerOps):
    def _reduce(self, aggregation: Any, per_device_value: Any, destinations: Any) -> Any:
        return self.broadcast(sum(per_device_value.values), destinations)


def towers(_: Any, rank: int, size: int, ports: list[int]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        older = [uo.contrib.AllReduceCrossTowerOps, uo.contrib.ReductionToOneDeviceCrossTowerOps]
    made = [None, uo.contrib.AllReduceCrossDeviceOps("hierarchical_copy"), OnWorkers()]
    made += [one() for one in older]
    return [used(port, rank, size, ops) for port, ops in zip(ports, made, strict=True)]


def used(port: int, rank: int, size: int, ops: Any) -> Any:
    strategy = worker(port, rank, size, 2, cross_device_ops=ops)
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> Any:
        own = torch.tensor(1.0 + context().replica_id_in_sync_group)
        optimizer.zero_grad()
        model(own.double() * torch.ones(1, 2).double()).square().mean().backward()
        optimizer.step()
        return context().all_reduce("SUM", own)

    totals = strategy.run(step)
    results = [
        [total.item() for total in totals.values],
        strategy.reduce("MEAN", totals).item(),
        [parameter.tolist() for parameter in model.parameters()],
    ]
    strategy.close()
    return results


def test_operations_of_contrib_reduce_inside_each_worker() -> None:
    ports = [free_port() for _ in range(5)]

    found = run_ranks(2, towers, ports, timeout=100)

    for results in found:
        assert results[0][:2] == [[10.0, 10.0], 10.0]
        assert results == [results[0]] * 5
