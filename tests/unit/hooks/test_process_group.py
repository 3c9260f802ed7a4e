"""The workers as a process group: what torch's own functions do with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from worker_threads import on_workers

from unisono.errors import UnsupportedError
from unisono.hooks import WorkersGroup
from unisono.workers import ConnectedWorkers

each_size = pytest.mark.parametrize("size", [1, 2, 3])
OPS = distributed.ReduceOp


@each_size
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (OPS.SUM, torch.sum),
        (OPS.AVG, torch.mean),
        (OPS.MIN, torch.amin),
        (OPS.MAX, torch.amax),
        (OPS.PRODUCT, torch.prod),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_torch_reduces_over_the_workers(
    size: int, shape: tuple[int, ...], op: Any, expected: Any
) -> None:
    def reduce(workers: ConnectedWorkers) -> list[Tensor]:
        group = WorkersGroup(workers.communicator)
        given = [torch.full(shape, group.rank() + 2.0) for _ in range(2)]
        distributed.all_reduce(given[0], op, group)
        work = distributed.all_reduce(given[1], op, group, async_op=True)
        assert work is not None
        work.wait()
        return [*given, *work.get_future().wait()]

    wanted = expected(torch.stack([torch.full(shape, rank + 2.0) for rank in range(size)]), 0)
    for found in on_workers(size, reduce):
        assert all(torch.equal(one, wanted) for one in found)


@each_size
def test_torch_gathers_over_the_workers(size: int) -> None:
    def gather(workers: ConnectedWorkers) -> list[Tensor]:
        group = WorkersGroup(workers.communicator)
        rooms = [torch.empty(2) for _ in range(group.size())]
        for _ in range(2):
            distributed.all_gather(rooms, torch.full((2,), float(group.rank())), group)
        return rooms

    for found in on_workers(size, gather):
        assert [one.tolist() for one in found] == [[rank] * 2 for rank in range(size)]


def test_a_tensor_of_any_strides_is_reduced_in_place() -> None:
    def reduce(workers: ConnectedWorkers) -> Tensor:
        columns = torch.arange(6.0).view(2, 3)
        WorkersGroup(workers.communicator).allreduce(columns.t())
        return columns

    for found in on_workers(2, reduce):
        assert torch.equal(found, 2 * torch.arange(6.0).view(2, 3))


def test_torch_broadcasts_and_scatters_sums_over_the_workers() -> None:
    def work(workers: ConnectedWorkers) -> list[list[float]]:
        group = WorkersGroup(workers.communicator)
        given = torch.arange(4.0) + group.rank()
        part = torch.empty(2)
        group.reduce_scatter_single(part, given).wait()
        group.broadcast(given, root=1).wait()
        group.barrier().wait()
        return [part.tolist(), given.tolist()]

    assert on_workers(2, work) == [[[1.0, 3.0], [1.0, 2, 3, 4]], [[5.0, 7.0], [1.0, 2, 3, 4]]]


def test_a_collective_that_workers_do_not_know_is_refused() -> None:
    def gather(workers: ConnectedWorkers) -> None:
        group = WorkersGroup(workers.communicator)
        group.gather([[torch.ones(3)]], [torch.ones(3)])

    with pytest.raises(UnsupportedError, match=r"cannot do gather on .*\(3,\)"):
        on_workers(1, gather)


def test_an_operation_that_workers_do_not_know_is_refused() -> None:
    def reduce(workers: ConnectedWorkers) -> None:
        group = WorkersGroup(workers.communicator)
        distributed.all_reduce(torch.ones(1, dtype=torch.int64), OPS.BAND, group)

    with pytest.raises(UnsupportedError, match=r"allreduce with .*BAND.*SUM, AVG"):
        on_workers(1, reduce)
