"""Workers as threads of the test, for what does not need its own process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from thread_ranks import make_threads

import unisono as uo
from unisono.communicators import Communicator
from unisono.workers import ConnectedWorkers

T = TypeVar("T")


def on_workers(num_workers: int, target: Callable[[ConnectedWorkers], T]) -> list[T]:
    """Calls `target` for each worker at the same time, and returns what it returned, by rank.

    When one raises, the others are not left to wait, and the first real error is raised.
    """

    def call(workers: ConnectedWorkers) -> T:
        with workers.communicator:
            result = target(workers)
            workers.communicator.barrier()
            return result

    return _on_threads(num_workers, call)


def on_strategies(
    num_workers: int,
    target: Callable[[uo.Strategy], T],
    *,
    num_replicas: int | Sequence[int] = 1,
    wrap: Callable[[Communicator], Communicator] = lambda communicator: communicator,
    make_ops: Callable[[], uo.CrossDeviceOps] = uo.ReductionToOneDevice,
    **settings: Any,
) -> list[T]:
    """Calls `target` on each worker with its strategy, and returns what it returned, by rank.

    All workers have `num_replicas`, or each the number at its rank.
    """
    counts = [num_replicas] * num_workers if isinstance(num_replicas, int) else num_replicas

    def call(workers: ConnectedWorkers) -> T:
        devices = tuple(uo.Device("cpu", i) for i in range(counts[workers.communicator.rank]))
        ops = make_ops()
        communicator = wrap(workers.communicator)
        own = ConnectedWorkers(communicator, counts)
        strategy = uo.Strategy(uo.StrategyExtended(devices, ops, workers=own, **settings))
        try:
            result = target(strategy)
            # Or who is done would be missed by others.
            workers.communicator.barrier()
            return result
        finally:
            strategy.close()

    return _on_threads(num_workers, call)


def communicator_of(strategy: uo.Strategy) -> Communicator:
    """What connects the workers of a strategy."""
    workers = strategy.extended.workers
    assert isinstance(workers, ConnectedWorkers)
    return workers.communicator


def _on_threads(num_workers: int, call: Callable[[ConnectedWorkers], T]) -> list[T]:
    communicators = make_threads(num_workers, timeout_seconds=120)
    with ThreadPoolExecutor(num_workers) as pool:
        futures = [
            pool.submit(call, ConnectedWorkers(communicator)) for communicator in communicators
        ]
        return [future.result(timeout=60) for future in futures]


def one_at_a_time(made: Callable[..., AbstractContextManager[T]]) -> Any:
    """Lets one thread at a time be in a context manager, such as `torch.random.fork_rng`.

    PowerSGD seeds torch's default generator there, which workers that are threads share.
    """
    lock = threading.Lock()

    @contextmanager
    def locked(*args: Any, **options: Any) -> Iterator[T]:
        with lock, made(*args, **options) as entered:
            yield entered

    return locked


def end_replica_threads() -> None:
    """The threads of a strategy end when nobody has it any more; a program need not close it."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("unisono-replica"):
            thread.join(timeout=60)
