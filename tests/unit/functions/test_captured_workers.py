"""Captured steps on several workers, which exchange gradients and buffers between two graphs."""

from __future__ import annotations

import os

import pytest
import torch
from processes.harness import run_ranks
from processes.ports import free_ports
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

import unisono as uo
from unisono.errors import UnisonoError
from unisono.experimental import CommunicationImplementation, CommunicationOptions
from unisono.hooks import Compress
from unisono.testing import virtual_gpus
from unit.functions.program_parts import Mark, batch, convnet, learn
from unit.functions.programs import PROGRAMS, outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*use of fork"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

RING, NCCL = CommunicationImplementation.RING, CommunicationImplementation.NCCL


def join(
    rank: int, ports: list[int], implementation: CommunicationImplementation, num_replicas: int
) -> uo.MultiWorkerMirroredStrategy:
    # NCCL refuses ranks that share a GPU, unless each seems to be on its own host.
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    resolver = uo.cluster_resolver.SimpleClusterResolver(
        {"worker": [f"127.0.0.1:{port}" for port in ports]}, task_type="worker", task_id=rank
    )
    options = CommunicationOptions(timeout_seconds=60, implementation=implementation)
    devices = [f"cuda:{i}" for i in range(num_replicas)]
    return uo.MultiWorkerMirroredStrategy(resolver, options, devices=devices)


def num_captured(strategy: uo.Strategy) -> int:
    functions = strategy.extended._captures._functions.values()
    steps = [step for one in functions for step in one._steps.values()]
    return sum(step.recording is not None for step in steps)


def train(
    _: Store, rank: int, __: int, ports: list[int], how: CommunicationImplementation, number: int
) -> list[str]:
    """Returns the programs that gave other bits when they were captured."""
    wrong = []
    with virtual_gpus(number):
        strategy = join(rank, ports, how, number)
        for name, program in PROGRAMS.items():
            wanted = outcome(program, strategy, lambda step: step)
            before = num_captured(strategy)
            found = outcome(program, strategy, uo.function(strict=True))
            assert num_captured(strategy) > before, name
            assert len(found) == len(wanted), name
            if not all(map(torch.equal, found, wanted)):
                wrong.append(name)
        strategy.close()
    return wrong


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("how", [RING, NCCL])
def test_captured_steps_of_workers_have_the_bits_of_eager_ones(
    how: CommunicationImplementation, num_replicas: int
) -> None:
    assert run_ranks(2, train, free_ports(2), how, num_replicas, timeout=110) == [[]] * 2


def hooked(strategy: uo.MultiWorkerMirroredStrategy, mark: Mark) -> list[Tensor]:
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        return learn(model, optimizer, images, labels)

    for i in range(6):
        strategy.run(step, args=batch(strategy, i))
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_with_hook(_: Store, rank: int, __: int, ports: list[int]) -> bool:
    results = []
    with virtual_gpus(1):
        for mark in (lambda step: step, uo.function(strict=True)):
            strategy = join(rank, ports, RING, 1)
            strategy.register_comm_hook(None, Compress(torch.float16))
            results.append(hooked(strategy, mark))
            strategy.close()
    return all(map(torch.equal, *results))


def test_hooks_are_called_in_every_replay() -> None:
    assert run_ranks(2, train_with_hook, free_ports(2), timeout=100) == [True, True]


def use_other_parameters(_: Store, rank: int, __: int, ports: list[int]) -> str:
    with virtual_gpus(1):
        strategy = join(rank, ports, RING, 1)
        with strategy.scope():
            always, sometimes = nn.Linear(3, 1), nn.Linear(3, 1)

        @uo.function(strict=True)
        def step(x: Tensor, both: bool) -> None:
            always.zero_grad()
            sometimes.zero_grad()
            total = always(x).sum()
            (total + sometimes(x).sum() if both else total).backward()

        x = torch.ones(2, 3, device="cuda")
        for _i in range(4):
            strategy.run(step, args=(x, False))
        try:
            # The other worker uses what was without a gradient when this one was captured.
            for _i in range(4):
                strategy.run(step, args=(x, rank == 1))
        except UnisonoError as error:
            # The other one has left then.
            return str(error)
        finally:
            strategy.close()
    return ""


def test_a_worker_that_uses_other_parameters_is_told() -> None:
    first, second = run_ranks(2, use_other_parameters, free_ports(2), timeout=100)
    assert "other gradients than when the step was captured" in first + second
