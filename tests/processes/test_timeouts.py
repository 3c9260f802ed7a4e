"""How long one collective may wait, whatever carries it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from processes.harness import Outcome, outcome, run_ranks
from unisono.communicators.communicator import Communicator
from unisono.communicators.delegating import TracedCommunicator
from unisono.communicators.network import NetworkCommunicator
from unisono.communicators.shared_memory import SharedMemoryCommunicator
from unisono.kernels import native_core
from unisono.options import ReduceOp

SECONDS = 60.0


def makers() -> dict[str, Callable[..., Communicator]]:
    found: dict[str, Callable[..., Communicator]] = {
        "TCP": lambda *rank: NetworkCommunicator(*rank, backend="tcp", timeout_seconds=SECONDS),
        "gloo": lambda *rank: NetworkCommunicator(*rank, backend="gloo", timeout_seconds=SECONDS),
    }
    if native_core().kernel is not None:
        found["shared memory"] = lambda *rank: TracedCommunicator(
            SharedMemoryCommunicator(*rank, timeout_seconds=SECONDS), group=1
        )
    return found


def with_all(store: Store, rank: int, work: Callable[[Communicator], Any]) -> dict[str, Any]:
    """Does the work with every kind of communicator at the same time."""
    made = {n: make(PrefixStore(n, store), rank, 2) for n, make in makers().items()}
    try:
        with ThreadPoolExecutor(len(made)) as pool:
            return dict(zip(made, pool.map(work, made.values()), strict=True))
    finally:
        for communicator in made.values():
            communicator.close()


def gives_up_early(store: Store, rank: int, size: int) -> dict[str, Outcome]:
    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        has_ended = f"{communicator.name} has ended"
        if rank == 1:
            store.wait([has_ended], timedelta(seconds=SECONDS))

        def reduce_twice() -> None:
            # Rank 1 may have the numbers of rank 0 before it learns that rank 0 has given up. Then
            # the first call succeeds there, and the next one fails.
            for _ in range(2):
                communicator.all_reduce(ReduceOp.SUM, [torch.ones(3)])

        with communicator.within(1.0):
            found = outcome(reduce_twice)
        store.set(has_ended, "")
        return found

    return with_all(store, rank, work)


def test_a_shorter_wait() -> None:
    first, second = run_ranks(2, gives_up_early)
    for name, (kind, message, ranks, seconds) in first.items():
        assert (name, kind, ranks) == (name, "WorkerTimeoutError", (1,))
        assert "waited 1 s" in message
        assert seconds < SECONDS / 2
    # All ranks hear the same.
    assert {name: found[0] for name, found in second.items()} == dict.fromkeys(
        first, "WorkerTimeoutError"
    )


def waits_longer(store: Store, rank: int, size: int) -> dict[str, list[float]]:
    def work(communicator: Communicator) -> list[float]:
        given = torch.ones(3)
        communicator.barrier()
        # As if it had been made with so little.
        communicator.set_timeout(0.5)
        with communicator.within(50.0):
            if rank == 1:
                # Gloo gives up 2 s after the time is over.
                time.sleep(3.0)
            communicator.all_reduce(ReduceOp.SUM, [given])
            communicator.barrier()
        return given.tolist()

    return with_all(store, rank, work)


def test_a_longer_wait() -> None:
    for found in run_ranks(2, waits_longer):
        assert found == {name: [2.0, 2.0, 2.0] for name in makers()}
