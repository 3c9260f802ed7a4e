"""One suite for every communicator: all collectives, to the bit, at every number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.communicator import Communicator
from unisono.communicators.identity import IdentityCommunicator
from unisono.communicators.threads import make_threads
from unisono.communicators.torch_distributed import TorchDistributedCommunicator

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "processes")]

from communicator_cases import failed_cases
from harness import run_ranks

SECONDS = 60.0


class Kind(NamedTuple):
    """How a communicator is made, and at which sizes."""

    make: Callable[[Store, int, int], Communicator]
    sizes: tuple[int, ...] = (2, 3, 5, 8)


def gloo(store: Store, rank: int, size: int, room: int | None = None) -> Communicator:
    return TorchDistributedCommunicator(
        store, rank, size, timeout_seconds=SECONDS, beside_header=room
    )


KINDS = {
    "gloo": Kind(gloo),
    "gloo, little beside the header": Kind(lambda *rank: gloo(*rank, 4096), (2, 3)),
    "gloo, nothing beside the header": Kind(lambda *rank: gloo(*rank, 0), (2, 5)),
}


def failures_by_kind(store: Store, rank: int, size: int) -> dict[str, list[str]]:
    failed = {}
    for name, kind in KINDS.items():
        if size in kind.sizes:
            with kind.make(PrefixStore(name, store), rank, size) as communicator:
                failed[name] = failed_cases(communicator)
                communicator.barrier()
    return failed


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_every_collective_has_the_bits_of_the_tree_in_processes(size: int) -> None:
    expected: dict[str, list[str]] = {n: [] for n, kind in KINDS.items() if size in kind.sizes}

    assert run_ranks(size, failures_by_kind, timeout=100) == [expected] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_collective_has_the_bits_of_the_tree_in_threads(size: int) -> None:
    with ThreadPoolExecutor(size) as pool:
        failed = list(pool.map(failed_cases, make_threads(size, timeout_seconds=SECONDS)))

    assert failed == [[]] * size


def test_every_collective_of_one_rank_alone_has_the_bits_of_the_tree() -> None:
    assert failed_cases(IdentityCommunicator()) == []
