"""The walks of docs/architecture.md are true.

The files of a walk call each other in the order given: a call of the last one is nested in calls of
all others. A batch goes from one stage to the next instead, so there the first calls count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import pytest
import torch
from click.testing import CliRunner
from processes.harness import run_ranks
from processes.pretended import hierarchical
from test_architecture import ROOT, SRC, WALKS
from torch._C._distributed_c10d import Store

import unisono as uo
from unisono.communicators.communicator import Communicator
from unisono.communicators.network import NetworkCommunicator
from unisono.devices import resolve
from unisono.workers import ConnectedWorkers
from unisono.workers.across import AcrossWorkers
from unisono_tools.cli.bench import bench

SECONDS = 60.0


def test_a_training_step(strategy: uo.MirroredStrategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(20, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch = uo.PerReplica([torch.ones(2, 20), torch.ones(2, 20)])
    strategy.run(step, args=(batch,))

    assert_nested("A training step", stacks(lambda: strategy.run(step, args=(batch,))))


def test_a_batch(strategy: uo.MirroredStrategy) -> None:
    loader = torch.utils.data.DataLoader(range(8), batch_size=4)  # type: ignore[arg-type, var-annotated]
    batches = iter(strategy.experimental_distribute_dataset(loader))
    next(batches)

    calls = [files[-1] for files in stacks(lambda: next(batches))]

    assert is_in_order(WALKS["A batch"], calls)


def test_an_all_reduce_between_hosts() -> None:
    # For a small tensor, one rank of each host talks to the others.
    of_first_rank, *_ = run_ranks(4, reduce_over_two_hosts)

    assert_nested("An all-reduce between hosts", of_first_rank)


def test_a_benchmark() -> None:
    pytest.importorskip("rich")
    arguments = ["reduce", "--sizes", "4096", "--replicas", "2", "--seconds", "0.01"]

    found = stacks(lambda: CliRunner().invoke(bench, arguments, catch_exceptions=False))

    assert_nested("A benchmark", found)


@pytest.fixture
def strategy() -> Iterator[uo.MirroredStrategy]:
    made = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    yield made
    made.close()


def assert_nested(name: str, found: Sequence[Sequence[str]]) -> None:
    walk = WALKS[name]
    ends = {tuple(files) for files in found if files[-1] == walk[-1]}

    assert any(is_in_order(walk, files) for files in ends), ends


def is_in_order(walk: list[str], files: Sequence[str]) -> bool:
    rest = iter(dict.fromkeys(files))
    return all(file in rest for file in walk)


def stacks(program: Callable[[], object]) -> list[list[str]]:
    """For every call that a program makes here, the sources that are being run, outermost first."""
    found = []

    def note(frame: FrameType | None, event: str, _: object) -> None:
        if event != "call" or source_of(frame) is None:
            return
        files = []
        while frame is not None:
            files.append(source_of(frame))
            frame = frame.f_back
        found.append([file for file in reversed(files) if file is not None])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        program()
    finally:
        sys.setprofile(before)
    return found


def source_of(frame: FrameType | None) -> str | None:
    """The file of a frame as a walk names it, or None if it is none of the sources."""
    file = "" if frame is None else frame.f_code.co_filename
    for folder in (ROOT, SRC):
        if file.startswith(f"{folder}/"):
            return file.removeprefix(f"{folder}/")
    return None


def reduce_over_two_hosts(store: Store, rank: int, size: int) -> list[list[str]]:
    """What a rank does: two hosts have two workers each, with one replica."""
    make = hierarchical(over_tcp, 2, "gloo", seconds=SECONDS)
    with make(store, rank, size) as communicator:
        devices = (resolve("cpu:0"),)
        ops = AcrossWorkers(uo.ReductionToOneDevice(), ConnectedWorkers(communicator), devices)
        value = uo.PerReplica([torch.ones(5)])
        ops.reduce(uo.ReduceOp.SUM, value, "cpu:0")
        found = stacks(lambda: ops.reduce(uo.ReduceOp.SUM, value, "cpu:0"))
        communicator.barrier()
    return found


def over_tcp(store: Store, rank: int, size: int) -> Communicator:
    return NetworkCommunicator(store, rank, size, backend="tcp", timeout_seconds=SECONDS)
