"""Captured steps on several workers, which exchange gradients and buffers between two graphs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from processes.harness import Outcome, Ranks, run_ranks
from processes.harness import outcome as error_of
from processes.ports import free_ports
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

import unisono as uo
from unisono.errors import UnisonoError
from unisono.experimental import CommunicationImplementation, CommunicationOptions
from unisono.hooks import Compress
from unisono.testing import virtual_gpus
from unit.functions.program_parts import KINDS, Mark, batch, convnet, learn, recordings
from unit.functions.programs import PROGRAMS, outcome, programs_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

AUTO = CommunicationImplementation.AUTO
RING, NCCL = CommunicationImplementation.RING, CommunicationImplementation.NCCL


@contextmanager
def joined(
    rank: int, ports: list[int], kind: str, implementation: CommunicationImplementation, number: int
) -> Iterator[uo.MultiWorkerMirroredStrategy]:
    # NCCL refuses ranks that share a GPU, unless each seems to be on its own host.
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    resolver = uo.cluster_resolver.SimpleClusterResolver(
        {"worker": [f"127.0.0.1:{port}" for port in ports]}, task_type="worker", task_id=rank
    )
    options = CommunicationOptions(timeout_seconds=60, implementation=implementation)
    devices = [f"{kind}:{i}" for i in range(number)]
    with virtual_gpus(number) if kind == "cuda" else nullcontext():
        strategy = uo.MultiWorkerMirroredStrategy(resolver, options, devices=devices)
        try:
            yield strategy
        finally:
            strategy.close()


def train(
    _: Store,
    rank: int,
    __: int,
    ports: list[int],
    kind: str,
    how: CommunicationImplementation,
    number: int,
) -> list[str]:
    """Returns the programs that gave other bits when they were captured."""
    wrong = []
    with joined(rank, ports, kind, how, number) as strategy:
        for name, program in programs_for(kind).items():
            wanted = outcome(program, strategy, lambda step: step)
            before = len(recordings(strategy))
            found = outcome(program, strategy, uo.function(strict=True))
            assert len(recordings(strategy)) > before, name
            assert len(found) == len(wanted), name
            if not all(map(torch.equal, found, wanted)):
                wrong.append(name)
    return wrong


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("cpu", AUTO),
        pytest.param("cuda", RING, marks=pytest.mark.gpu),
        pytest.param("cuda", NCCL, marks=pytest.mark.gpu),
    ],
)
def test_captured_steps_of_workers_have_the_bits_of_eager_ones(
    kind: str, how: CommunicationImplementation, num_replicas: int
) -> None:
    assert run_ranks(2, train, free_ports(2), kind, how, num_replicas, timeout=280) == [[]] * 2


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


def train_with_hook(_: Store, rank: int, __: int, ports: list[int], kind: str) -> bool:
    results = []
    for mark in (lambda step: step, uo.function(strict=True)):
        with joined(rank, ports, kind, RING, 1) as strategy:
            strategy.register_comm_hook(None, Compress(torch.float16))
            results.append(hooked(strategy, mark))
    return all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_called_in_every_replay(kind: str) -> None:
    assert run_ranks(2, train_with_hook, free_ports(2), kind, timeout=100) == [True, True]


def use_other_parameters(_: Store, rank: int, __: int, ports: list[int], kind: str) -> str:
    with joined(rank, ports, kind, RING, 1) as strategy:
        with strategy.scope():
            always, sometimes = nn.Linear(3, 1), nn.Linear(3, 1)

        @uo.function(strict=True)
        def step(x: Tensor, both: bool) -> None:
            always.zero_grad()
            sometimes.zero_grad()
            total = always(x).sum()
            (total + sometimes(x).sum() if both else total).backward()

        x = torch.ones(2, 3, device=kind)
        for _i in range(4):
            strategy.run(step, args=(x, False))
        try:
            # The other worker uses what was without a gradient when this one was captured.
            for _i in range(4):
                strategy.run(step, args=(x, rank == 1))
        except UnisonoError as error:
            # The other one has left then.
            return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_uses_other_parameters_is_told(kind: str) -> None:
    first, second = run_ranks(2, use_other_parameters, free_ports(2), kind, timeout=100)
    assert "other gradients than when the step was captured" in first + second


def calls_in_between(_: Store, rank: int, __: int, ports: list[int], name: str) -> list[int]:
    """Returns how many calls Python makes in each captured step, all of which are joint."""
    with joined(rank, ports, "cuda", NCCL, 2) as strategy:
        outcome(PROGRAMS[name], strategy, uo.function(strict=True))
        assert all(recording.is_joint for recording in recordings(strategy))
        return [recording.num_calls for recording in recordings(strategy)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["SGD with momentum", "Adam, capturable", "clipping"])
def test_graphs_hold_what_workers_exchange_over_nccl(name: str) -> None:
    assert run_ranks(2, calls_in_between, free_ports(2), name, timeout=100) == [[0], [0]]


def unlike_the_other(strategy: uo.Strategy, mark: Mark, rank: int) -> Iterator[Tensor]:
    """Trains with signatures, and with a reason to stay eager, that the other worker lacks."""
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @mark
    def step(images: Tensor, labels: Tensor, other: Tensor) -> Tensor:
        return learn(model, optimizer, images, labels) + other.sum()

    @mark
    def reading(images: Tensor, labels: Tensor) -> float:
        loss = learn(model, optimizer, images, labels)
        return float(loss) if rank == 1 else 0.0

    for i in range(24):
        other = torch.ones(1 + i // 3 % (2 + rank), device="cuda")
        yield strategy.run(step, args=(*batch(strategy, i), other))
        strategy.run(reading, args=batch(strategy, i))
    yield from (parameter.detach().clone() for parameter in model.parameters())


def meet_in_turns(_: Store, rank: int, __: int, ports: list[int]) -> list[bool]:
    found = []
    for mark in (lambda step: step, uo.function):
        with joined(rank, ports, "cuda", NCCL, 1) as strategy:
            found.append(list(unlike_the_other(strategy, mark, rank)))
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


@pytest.mark.gpu
def test_workers_that_cannot_capture_together_exchange_as_in_eager_steps() -> None:
    found = run_ranks(2, meet_in_turns, free_ports(2), timeout=100)
    assert all(all(one) for one in found), found


def lose_the_other(_: Store, rank: int, __: int, ports: list[int]) -> tuple[Outcome, float]:
    """Trains until worker 1 is gone, and uses the GPU afterwards."""
    with joined(rank, ports, "cuda", NCCL, 1) as strategy:
        with strategy.scope():
            model = convnet()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @uo.function(strict=True)
        def step(images: Tensor, labels: Tensor) -> Tensor:
            if rank == 1:
                # In the replay of the other worker, the GPU waits for this one.
                torch.cuda._sleep(100_000_000)
            return learn(model, optimizer, images, labels)

        def train() -> None:
            for i in range(1000):
                if rank == 1 and i == 9:
                    # In the middle of the step, for which the other one waits already.
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.setitimer(signal.ITIMER_REAL, 0.02)
                strategy.run(step, args=batch(strategy, i))

        error = error_of(train)
    return error, torch.ones(3, device="cuda").sum().item()


@pytest.mark.gpu
def test_a_worker_that_is_lost_in_a_captured_step_is_named() -> None:
    begun = time.monotonic()
    with Ranks(2, lose_the_other, free_ports(2)) as ranks:
        ((kind, message, at_fault, _), total) = ranks.results(100)[0]
    assert (kind, at_fault) == ("WorkerLostError", (1,)), message
    assert total == 3
    # Not only at the deadline of 60 s.
    assert time.monotonic() - begun < 50
