"""Workers as threads of the test, for what needs no process of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from unisono.communicators.threads import ThreadCommunicator, make_threads
from unisono.reductions import Workers

T = TypeVar("T")


def on_workers(num_workers: int, target: Callable[[Workers], T]) -> list[T]:
    """Calls `target` for each worker at the same time, and returns what it returned, by rank.

    When one raises, the others are not left to wait, and the first real error is raised.
    """

    def call(communicator: ThreadCommunicator) -> T:
        with communicator:
            result = target(Workers(communicator))
            communicator.barrier()
            return result

    communicators = make_threads(num_workers, timeout_seconds=20)
    with ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(call, communicator) for communicator in communicators]
        return [future.result(timeout=60) for future in futures]
