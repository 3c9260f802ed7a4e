"""Several hosts, as network namespaces: who talks through what, and what a cut cable does."""

from __future__ import annotations

import ctypes
import logging
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
from processes.leftovers import extra_threads
from processes.namespaces import Hosts, enter, make_hosts
from unisono.communicators import gloo
from unisono.communicators.communicator import Communicator
from unisono.communicators.connect import connect
from unisono.errors import CommunicationError
from unisono.kernels import native_core
from unisono.options import CommunicationImplementation, ReduceOp
from unisono_tools.namespaces import run

AUTO, RING = CommunicationImplementation.AUTO, CommunicationImplementation.RING
TCP = CommunicationImplementation.TCP
# What a busy machine may take where nobody has to wait for the end of a timeout.
SECONDS_TO_NOTICE = 50.0
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
    limit = timedelta(seconds=60)
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


@pytest.mark.parametrize(
    ("implementation", "size", "num_hosts"), [(AUTO, 4, 2), (RING, 3, 3), (TCP, 4, 2), (TCP, 3, 3)]
)
def test_collectives_between_hosts_have_the_bits_of_the_tree(
    implementation: CommunicationImplementation, size: int, num_hosts: int
) -> None:
    with make_hosts(num_hosts) as hosts:
        hosts.slow_down("1gbit")
        results = run_ranks(size, collectives, hosts.names, implementation, timeout=90)

    name = "TCP" if implementation is TCP else "Gloo"
    if implementation is not RING and size > num_hosts and native_core().kernel is not None:
        name = f"shared memory inside 2 hosts, {name} between them"
    assert results == [(name, [])] * size


def lose_the_network(
    store: Store,
    rank: int,
    size: int,
    names: list[str],
    implementation: CommunicationImplementation,
) -> tuple[str, tuple[int, ...], float, float, int]:
    threads = threading.active_count()
    communicator = join(rank, size, names, implementation, timeout=12.0)
    total = torch.ones(5)
    communicator.all_reduce(ReduceOp.SUM, [total])
    store.set(f"ready/{rank}", "")
    store.wait(["cut"], timedelta(seconds=60))
    start = time.monotonic()
    try:
        communicator.all_reduce(ReduceOp.SUM, [total])
    except CommunicationError as error:
        raised, ranks = f"{type(error).__name__}: {error}", error.ranks
    seconds = time.monotonic() - start
    start = time.monotonic()
    communicator.close()
    seconds_to_close = time.monotonic() - start
    left = extra_threads(threads)
    # The coordinator ends last, so that the others hear what happened.
    store.set(f"closed/{rank}", "")
    store.wait([f"closed/{other}" for other in range(size)], timedelta(seconds=60))
    return raised, ranks, seconds, seconds_to_close, left


@pytest.mark.parametrize("implementation", [AUTO, TCP])
def test_a_cut_cable_is_told_on_both_sides(
    two_hosts: Hosts, implementation: CommunicationImplementation
) -> None:
    with Ranks(4, lose_the_network, two_hosts.names, implementation) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(4)], timedelta(seconds=60))
        two_hosts.cut(1)
        ranks.store.set("cut", "")
        results = ranks.results()

    for rank, (raised, at_fault, seconds, seconds_to_close, left) in results.items():
        assert raised.startswith(("WorkerLostError", "WorkerTimeoutError"))
        assert at_fault == ((2, 3) if rank < 2 else (0,)), raised
        assert seconds < 12 + SECONDS_TO_NOTICE
        assert seconds_to_close < SECONDS_TO_NOTICE
        assert left == 0


PAUSE_SECONDS = 11.0


def hold_on(store: Store, rank: int, size: int, names: list[str]) -> list[float]:
    """Rank 0, beside the coordinator, is stopped from outside; then rank 3 holds the lock."""
    communicator = join(rank, size, names, AUTO, timeout=1.9 * PAUSE_SECONDS)
    totals = []
    for phase in range(2):
        store.set(f"ready/{phase}/{rank}", "")
        store.wait([f"go/{phase}"], timedelta(seconds=60))
        if (phase, rank) == (1, 3):
            ctypes.PyDLL(None).usleep(int(PAUSE_SECONDS * 1e6))
        total = torch.ones(1)
        communicator.all_reduce(ReduceOp.SUM, [total])
        totals.append(total.item())
    communicator.barrier()
    communicator.close()
    return totals


def test_a_coordinator_that_is_paused_and_a_rank_that_holds_the_lock_end_no_job(
    two_hosts: Hosts,
) -> None:
    with Ranks(4, hold_on, two_hosts.names) as ranks:
        ranks.store.wait([f"ready/0/{rank}" for rank in range(4)], timedelta(seconds=60))
        coordinator = ranks.processes[0].pid or 0
        os.kill(coordinator, signal.SIGSTOP)
        ranks.store.set("go/0", "")
        time.sleep(PAUSE_SECONDS)
        os.kill(coordinator, signal.SIGCONT)
        ranks.store.wait([f"ready/1/{rank}" for rank in range(4)], timedelta(seconds=60))
        ranks.store.set("go/1", "")
        results = ranks.results()

    assert [results[rank] for rank in range(4)] == [[4.0, 4.0]] * 4


def lose_a_link(store: Store, rank: int, size: int, names: list[str]) -> tuple[str, float]:
    communicator = join(rank, size, names, AUTO, timeout=12.0)
    communicator.barrier()
    store.set(f"ready/{rank}", "")
    store.wait(["cut"], timedelta(seconds=60))
    start = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        # Rank 0 has all that it needs of the first one.
        for _ in range(2):
            communicator.all_reduce(ReduceOp.SUM, [torch.ones(5)])
    seconds = time.monotonic() - start
    communicator.close()
    store.set(f"closed/{rank}", "")
    store.wait([f"closed/{other}" for other in range(size)], timedelta(seconds=60))
    return f"{caught.value.ranks} {caught.value}", seconds


def test_a_cut_between_two_hosts_that_rank_0_still_reaches_names_its_ends() -> None:
    with make_hosts(3) as hosts, Ranks(3, lose_a_link, hosts.names) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(3)], timedelta(seconds=60))
        for one, other in ((1, 2), (2, 1)):
            run("ip", "-n", hosts.names[one], "route", "add", "blackhole", hosts.address(other))
        ranks.store.set("cut", "")
        results = ranks.results()

    assert len({raised for raised, _ in results.values()}) == 1
    assert results[0][0].startswith(("(1,)", "(2,)", "(1, 2)"))
    assert all(seconds < 12 + SECONDS_TO_NOTICE for _, seconds in results.values())


class Announcement(logging.Handler):
    """Says in a store that something was logged."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def emit(self, record: logging.LogRecord) -> None:
        self.store.set("logged", record.getMessage())


def join_without_a_route(store: Store, rank: int, size: int, names: list[str]) -> tuple[str, float]:
    gloo._FIRST_SECONDS = 1.0
    logging.getLogger("unisono.communicators.gloo").addHandler(Announcement(store))
    with join(rank, size, names, AUTO) as communicator:
        total = torch.ones(1)
        communicator.all_reduce(ReduceOp.SUM, [total])
        communicator.barrier()
    store.set(f"closed/{rank}", "")
    store.wait([f"closed/{other}" for other in range(size)], timedelta(seconds=60))
    return communicator.name, total.item()


def test_gloo_connects_once_there_is_a_route_between_two_hosts() -> None:
    with make_hosts(3) as hosts:
        # All reach rank 0, so they meet.
        missing = ["route", "add", "unreachable", hosts.address(1)]
        run("ip", "-n", hosts.names[2], *missing)
        with Ranks(3, join_without_a_route, hosts.names) as ranks:
            ranks.store.wait(["logged"], timedelta(seconds=60))
            run("ip", "-n", hosts.names[2], "route", "delete", *missing[2:])
            results = ranks.results()

    assert list(results.values()) == [("Gloo", 3.0)] * 3


def lose_a_rank(
    store: Store, rank: int, size: int, names: list[str], lost: int
) -> tuple[str, float]:
    """A rank is killed before the second collective."""
    communicator = join(rank, size, names, AUTO, timeout=100.0)
    total = torch.ones(5)
    communicator.all_reduce(ReduceOp.SUM, [total])
    store.set(f"summed/{rank}", "")
    if rank == lost:
        # What it has sent may be lost with it.
        store.wait([f"summed/{other}" for other in range(size)], timedelta(seconds=60))
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        communicator.all_reduce(ReduceOp.SUM, [total])
    except CommunicationError as error:
        raised = f"{type(error).__name__} {error.ranks}: {error}"
    seconds = time.monotonic() - start
    communicator.close()
    store.set(f"closed/{rank}", "")
    others = [other for other in range(size) if other != lost]
    store.wait([f"closed/{other}" for other in others], timedelta(seconds=60))
    return raised, seconds


# Rank 3 is not the first of its host. With rank 0 the coordinator goes, and nobody decides.
@pytest.mark.parametrize("lost", [0, 3])
def test_a_dead_rank_of_another_host_is_told_to_all_by_its_number(
    two_hosts: Hosts, lost: int
) -> None:
    with Ranks(4, lose_a_rank, two_hosts.names, lost) as ranks:
        results = ranks.results()

    assert sorted(results) == [rank for rank in range(4) if rank != lost]
    for raised, seconds in results.values():
        assert raised.startswith(f"WorkerLostError ({lost},): ")
        assert seconds < SECONDS_TO_NOTICE
    assert lost == 0 or len({raised for raised, _ in results.values()}) == 1
