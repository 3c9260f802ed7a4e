"""DDP, FSDP and tensor parallelism over the backend leave traces, as strategies do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import unisono as uo
from processes.backend_cases import joined
from processes.backend_training import train
from processes.harness import run_ranks
from unisono.tracing import Trace, WorkerTrace

pytestmark = pytest.mark.backend

# (group, number) of every collective, which all ranks of the group have in common.
Collectives = dict[tuple[int, int], str]


def train_in_three_ways(store: Store, rank: int, size: int, folder: str) -> None:
    with joined(store, rank, size), uo.tracing.record(folder):
        part = distributed.new_group([1])
        for name in ("plain", "sharded by parameter"):
            train(name, distributed.group.WORLD, rank)
        mesh = init_device_mesh("cpu", (size,))
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)(torch.ones(2, 4)).sum().backward()
        if rank == 1:
            distributed.barrier(part)


def collectives(worker: WorkerTrace) -> Collectives:
    return {
        (event.arguments["group"], event.arguments["number"]): event.name
        for event in worker.events()
        if event.category == "collective"
    }


def test_collectives_are_recorded_and_matched(tmp_path: Path) -> None:
    run_ranks(2, train_in_three_ways, str(tmp_path))

    trace = Trace(tmp_path)
    first, second = map(collectives, trace.workers())
    assert first.items() < second.items()
    assert set(first.values()) >= {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    # A group of one rank is no other group.
    assert [second[key] for key in second.keys() - first.keys()] == ["barrier"]
    summary = trace.summary()
    assert (summary.num_workers, summary.num_steps, sorted(summary.replicas)) == (2, 0, [0, 1])
    assert all(shares.communication > 0 for shares in summary.replicas.values())
