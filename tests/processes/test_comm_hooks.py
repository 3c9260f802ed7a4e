"""Communication hooks between real workers, over shared memory and over Gloo."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import unisono as uo
from processes.harness import run_ranks
from unisono_tools.processes import free_ports

connect: Any = importlib.import_module("unisono.communicators.connect")


class Learnt(NamedTuple):
    """What a worker has after training."""

    losses: list[float]
    weights: bytes


def strategy_of(rank: int, ports: list[int], implementation: str) -> uo.MultiWorkerMirroredStrategy:
    resolver = uo.cluster_resolver.SimpleClusterResolver(
        {"worker": [f"127.0.0.1:{port}" for port in ports]}, task_type="worker", task_id=rank
    )
    options = uo.experimental.CommunicationOptions(
        bytes_per_pack=4096,
        timeout_seconds=30,
        implementation=uo.experimental.CommunicationImplementation(implementation),
    )
    return uo.MultiWorkerMirroredStrategy(resolver, options, devices=["cpu:0", "cpu:1"])


def train(strategy: uo.Strategy, num_steps: int) -> Learnt:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    target = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        context = uo.get_replica_context()
        assert context is not None
        draw = torch.Generator().manual_seed(context.replica_id_in_sync_group)
        inputs = torch.randn(16, 32, generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), (inputs @ target).tanh())
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [strategy.reduce("MEAN", strategy.run(step)).item() for _ in range(num_steps)]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Learnt(losses, weights.numpy().tobytes())


def train_with_power_sgd(
    _: Store, rank: int, size: int, ports: list[int]
) -> dict[str, tuple[Learnt, float]]:
    found = {}
    for implementation in ("AUTO", "RING"):
        strategy = strategy_of(rank, ports, implementation)
        state = powerSGD_hook.PowerSGDState(
            strategy.process_group, matrix_approximation_rank=2, start_powerSGD_iter=3
        )
        strategy.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        learnt = train(strategy, num_steps=40)
        strategy.close()
        rate, *_ = state.compression_stats()
        found[implementation] = learnt, rate
    return found


def test_power_sgd_trains_through_the_hook_of_torch() -> None:
    first, second = run_ranks(2, train_with_power_sgd, free_ports(2))

    # The same bits on both workers, over every transport.
    assert first == second
    assert first["AUTO"] == first["RING"]
    learnt, rate = first["AUTO"]
    assert learnt.losses[-1] < 0.5 * learnt.losses[0]
    assert rate > 4


def train_compressed(_: Store, rank: int, size: int, ports: list[int]) -> list[Learnt]:
    found = []
    for implementation, hosts in [("AUTO", 1), ("RING", 1), ("AUTO", 2)]:
        # Workers that take each other for strangers share no memory.
        connect.host_identity = lambda hosts=hosts: f"host {rank * hosts // size}"
        strategy = strategy_of(rank, ports, implementation)
        strategy.register_comm_hook(None, uo.hooks.Compress(torch.bfloat16, error_feedback=True))
        found.append(train(strategy, num_steps=20))
        strategy.close()
    return found


def test_compression_gives_the_same_bits_whoever_carries_it() -> None:
    for found in run_ranks(4, train_compressed, free_ports(4)):
        assert len({learnt.weights for learnt in found}) == 1
        assert found[0].losses[-1] < 0.5 * found[0].losses[0]
