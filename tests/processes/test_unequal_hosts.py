"""Hosts of which every rank calls the same, but another host something else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from processes.harness import Outcome, outcome, run_ranks
from processes.pretended import hierarchical
from unisono.communicators.communicator import Communicator
from unisono.communicators.shared_memory import SharedMemoryCommunicator
from unisono.kernels import native_core
from unisono.options import ReduceOp

SUM, MAX = ReduceOp.SUM, ReduceOp.MAX
SECONDS = 60.0
Call = Callable[[Communicator], object]


def shared_memory(store: Store, rank: int, size: int) -> Communicator:
    return SharedMemoryCommunicator(store, rank, size, timeout_seconds=SECONDS)


def reduces(op: ReduceOp, *shape: int, dtype: torch.dtype = torch.float32, terms: int = 1) -> Call:
    def call(communicator: Communicator) -> None:
        communicator.all_reduce(op, [torch.ones(shape, dtype=dtype) for _ in range(terms)])

    return call


def moves(kind: str, tensor: Tensor, **root: int) -> Call:
    return lambda communicator: getattr(communicator, kind)(tensor.clone(), **root)


def barrier(communicator: Communicator) -> None:
    communicator.barrier()


# What the first host calls, and what the second does; each is known by some words.
CASES: dict[str, tuple[Call, str, Call, str]] = {
    "shape": (reduces(SUM, 2, 3), "(2, 3)", reduces(SUM, 3, 2), "(3, 2)"),
    "length": (reduces(SUM, 5), "(5,)", reduces(SUM, 600_000), "(600000,)"),
    "dtype": (
        reduces(SUM, 5, dtype=torch.float16),
        "1 float16 tensor",
        reduces(SUM, 5),
        "1 float32 tensor",
    ),
    "op": (reduces(MAX, 0), "max of", reduces(SUM, 0), "sum of"),
    "terms": (reduces(SUM, 5), "1 float32", reduces(SUM, 5, terms=2), "2 float32"),
    "kind": (
        lambda one: one.reduce_scatter(SUM, [torch.ones(5)]),
        "reduce_scatter number 2",
        reduces(SUM, 5),
        "all_reduce number 2",
    ),
    "order": (barrier, "barrier number 2", moves("all_gather", torch.ones(2)), "all_gather number"),
    "root on one host": (
        moves("broadcast", torch.ones(2), root=0),
        "broadcast number 2 from rank 0",
        moves("broadcast", torch.ones(2), root=1),
        "from rank 1",
    ),
    "root on another host": (
        moves("gather", torch.ones(2), root=1),
        "gather number 2 to rank 1",
        moves("gather", torch.ones(2), root=2),
        "to rank 2",
    ),
}


def fail(store: Store, rank: int, size: int, num_hosts: int, names: list[str]) -> list[Outcome]:
    backend = "gloo" if num_hosts == 2 else "tcp"
    make = hierarchical(shared_memory, num_hosts, backend, seconds=SECONDS)
    results = []
    for name in names:
        first, _, second, _ = CASES[name]
        with make(PrefixStore(name, store), rank, size) as communicator:
            communicator.barrier()
            # The last host calls something else than all before it.
            call = second if rank // 2 == num_hosts - 1 else first
            results.append(outcome(functools.partial(call, communicator)))
    return results


@pytest.mark.skipif(
    native_core().kernel is None, reason=f"needs the native core: {native_core().status}"
)
@pytest.mark.parametrize(("num_hosts", "names"), [(2, list(CASES)), (3, ["shape", "order"])])
def test_hosts_that_call_different_things_are_named_on_every_rank(
    num_hosts: int, names: list[str]
) -> None:
    size = 2 * num_hosts
    first_ranks = "ranks 0 and 1" if num_hosts == 2 else "ranks 0, 1, 2 and 3"
    last_ranks = f"ranks {size - 2} and {size - 1}"
    # Of two hosts nobody can tell which is wrong.
    at_fault = range(size) if num_hosts == 2 else (size - 2, size - 1)
    for results in run_ranks(size, fail, num_hosts, names, timeout=200):
        for name, (kind, message, ranks, seconds) in zip(names, results, strict=True):
            _, first, _, second = CASES[name]
            told = f"{name}: {kind} {message}"
            assert kind == "UnequalCollectivesError", told
            assert ranks == tuple(at_fault), told
            for words in (f"{first_ranks} called", first, f"{last_ranks} called", second):
                assert words in message, told
            assert seconds < SECONDS / 2, told
