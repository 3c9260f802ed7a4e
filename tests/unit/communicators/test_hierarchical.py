"""Tensors that go between hosts in several chunks."""

from __future__ import annotations

import torch
from processes.harness import run_ranks
from processes.pretended import hierarchical
from torch import Tensor
from torch._C._distributed_c10d import Store

from unisono.communicators.communicator import Communicator
from unisono.communicators.network import NetworkCommunicator
from unisono.errors import UnequalCollectivesError
from unisono.kernels import tree_reduce
from unisono.options import ReduceOp

# Five chunks, the last of which is short, and odd parts.
LENGTH = 4 * (1 << 20) + 3


def over_tcp(store: Store, rank: int, size: int) -> Communicator:
    return NetworkCommunicator(store, rank, size, backend="tcp", timeout_seconds=30)


def brought_by(rank: int) -> Tensor:
    return torch.arange(LENGTH, dtype=torch.float32).sin_().mul_(rank + 0.1)


def reduced(store: Store, rank: int, size: int, num_hosts: int, backend: str) -> list[bool]:
    make = hierarchical(over_tcp, num_hosts, backend, seconds=30)
    terms = [brought_by(other) for other in range(size)]
    expected = tree_reduce(ReduceOp.SUM, terms)
    are_equal = []
    with make(store, rank, size) as communicator:
        for op, wanted in [(ReduceOp.SUM, expected), (ReduceOp.MEAN, expected / size)] * 2:
            found = brought_by(rank)
            communicator.all_reduce(op, [found])
            are_equal.append(torch.equal(found, wanted))
        communicator.barrier()
    return are_equal


def differ(store: Store, rank: int, size: int) -> str:
    """Rank 1 calls what sends data with its header, and the others what sends none."""
    with hierarchical(over_tcp, 2, "tcp", seconds=30)(store, rank, size) as communicator:
        try:
            if rank == 1:
                communicator.all_reduce(ReduceOp.SUM, [torch.ones(3)])
            else:
                communicator.barrier()
        except UnequalCollectivesError as error:
            return str(error)
    return "nothing"


def test_ranks_of_a_host_that_call_different_things_are_told() -> None:
    for told in run_ranks(4, differ):
        assert "all_reduce number 1" in told
        assert "barrier number 1" in told


def test_large_tensors_have_the_bits_of_the_tree_between_two_and_three_hosts() -> None:
    assert run_ranks(4, reduced, 2, "gloo") == [[True] * 4] * 4
    assert run_ranks(6, reduced, 3, "tcp") == [[True] * 4] * 6
