"""Several hosts, as network namespaces: who talks through what, and what a cut cable does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from conformance.communicator_cases import failed_cases
from torch._C._distributed_c10d import Store, TCPStore

from processes.harness import Ranks, run_ranks
from processes.namespaces import Hosts, enter, make_hosts
from unisono.communicators.communicator import Communicator
from unisono.communicators.connect import connect
from unisono.errors import CommunicationError
from unisono.kernels import native_core
from unisono.options import CommunicationImplementation, ReduceOp

pytestmark = pytest.mark.alone

AUTO, RING = CommunicationImplementation.AUTO, CommunicationImplementation.RING
EVERY_TENTH = slice(0, None, 10)


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    with make_hosts(2) as hosts:
        yield hosts


def join(
    rank: int,
    size: int,
    names: list[str],
    implementation: CommunicationImplementation,
    timeout: float = 60.0,
) -> Communicator:
    """Goes to the host of `rank` and connects; the coordinator is beside rank 0."""
    enter(names[rank * len(names) // size])
    limit = timedelta(seconds=30)
    store = TCPStore("10.83.0.1", 29400, None, rank == 0, limit, wait_for_workers=False)
    return connect(store, rank, size, timeout_seconds=timeout, implementation=implementation)


def collectives(
    store: Store,
    rank: int,
    size: int,
    names: list[str],
    implementation: CommunicationImplementation,
) -> tuple[str, list[str]]:
    with join(rank, size, names, implementation) as communicator:
        failed = failed_cases(communicator, EVERY_TENTH)
        communicator.barrier()
        if rank == 0:
            # The coordinator ends last.
            time.sleep(0.5)
        return communicator.name, failed


@pytest.mark.parametrize("implementation", [AUTO, RING])
@pytest.mark.parametrize(("size", "num_hosts"), [(4, 2), (3, 3)])
def test_collectives_between_hosts_have_the_bits_of_the_tree(
    implementation: CommunicationImplementation, size: int, num_hosts: int
) -> None:
    with make_hosts(num_hosts) as hosts:
        hosts.slow_down("1gbit")
        results = run_ranks(size, collectives, hosts.names, implementation, timeout=90)

    name = "TCP" if implementation is AUTO else "torch.distributed with gloo"
    if implementation is AUTO and size > num_hosts and native_core().kernel is not None:
        name = "shared memory inside 2 hosts, TCP between them"
    assert results == [(name, [])] * size


def lose_the_network(
    store: Store,
    rank: int,
    size: int,
    names: list[str],
    implementation: CommunicationImplementation,
) -> tuple[str, tuple[int, ...], float, float, int]:
    threads = threading.active_count()
    communicator = join(rank, size, names, implementation, timeout=8.0)
    total = torch.ones(5)
    communicator.all_reduce(ReduceOp.SUM, [total])
    store.set(f"ready/{rank}", "")
    store.wait(["cut"], timedelta(seconds=30))
    start = time.monotonic()
    try:
        communicator.all_reduce(ReduceOp.SUM, [total])
    except CommunicationError as error:
        raised, ranks = f"{type(error).__name__}: {error}", error.ranks
    seconds = time.monotonic() - start
    start = time.monotonic()
    communicator.close()
    seconds_to_close = time.monotonic() - start
    left = threading.active_count() - threads
    # The coordinator ends last, so that the others hear what happened.
    store.set(f"closed/{rank}", "")
    store.wait([f"closed/{other}" for other in range(size)], timedelta(seconds=30))
    return raised, ranks, seconds, seconds_to_close, left


@pytest.mark.parametrize("implementation", [AUTO, RING])
def test_a_cut_cable_is_told_on_both_sides(
    two_hosts: Hosts, implementation: CommunicationImplementation
) -> None:
    with Ranks(4, lose_the_network, two_hosts.names, implementation) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(4)], timedelta(seconds=30))
        two_hosts.cut(1)
        ranks.store.set("cut", "")
        results = ranks.results()

    for rank, (raised, at_fault, seconds, seconds_to_close, left) in results.items():
        assert raised.startswith(("WorkerLostError", "WorkerTimeoutError"))
        assert at_fault == ((2, 3) if rank < 2 else (0,)), raised
        assert seconds < 12
        assert seconds_to_close < 4
        assert left == 0


def lose_a_rank(store: Store, rank: int, size: int, names: list[str]) -> tuple[str, float]:
    """Rank 3, which is not the first of its host, is killed before the second collective."""
    communicator = join(rank, size, names, AUTO, timeout=10.0)
    total = torch.ones(5)
    communicator.all_reduce(ReduceOp.SUM, [total])
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        communicator.all_reduce(ReduceOp.SUM, [total])
    except CommunicationError as error:
        raised = f"{type(error).__name__} {error.ranks}: {error}"
    seconds = time.monotonic() - start
    communicator.close()
    store.set(f"closed/{rank}", "")
    store.wait([f"closed/{other}" for other in range(3)], timedelta(seconds=30))
    return raised, seconds


def test_a_dead_rank_of_another_host_is_told_to_all_by_its_number(two_hosts: Hosts) -> None:
    with Ranks(4, lose_a_rank, two_hosts.names) as ranks:
        results = ranks.results()

    assert sorted(results) == [0, 1, 2]
    assert len({raised for raised, _ in results.values()}) == 1
    for raised, seconds in results.values():
        assert raised.startswith("WorkerLostError (3,): ")
        assert seconds < 10
