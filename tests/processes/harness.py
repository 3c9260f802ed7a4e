"""Ranks as real processes, which end with the test whatever happens."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

import unisono as uo
from processes.forked import PROCESSES
from unisono.errors import CommunicationError

Target = Callable[..., Any]
Outcome = tuple[str, str, tuple[int, ...], float]


class Ranks:
    """Processes that run `target(store, rank, size, *args)`, each with its own store.

    The store lives in the process of the test, so no rank is needed to reach it.
    """

    def __init__(self, size: int, target: Target, *args: Any, skip: tuple[int, ...] = ()) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[int, BaseProcess] = {}
        self.results_so_far: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        started = sorted(set(range(size)) - set(skip))
        for rank in started:
            self._pipes[rank], theirs = PROCESSES.Pipe(duplex=False)
            arguments = (theirs, self.store.port, target, rank, size, args, started)
            self.processes[rank] = PROCESSES.Process(target=_run, args=arguments, daemon=True)
            self.processes[rank].start()
            theirs.close()

    def results(
        self, timeout: float = 200.0, *, of: tuple[int, ...] | None = None
    ) -> dict[int, Any]:
        """Returns what the ranks, or some of them, returned; one that was killed is left out.

        Raises:
            AssertionError: with the tracebacks of all ranks that raised, or those that are late.
        """
        deadline = time.monotonic() + timeout
        waiting = {rank: self._pipes[rank] for rank in of or self._pipes}
        failures = []
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(waiting.values()), timeout=left)
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    returned, value = waiting.pop(rank).recv()
                except EOFError:
                    continue
                if returned:
                    self.results_so_far[rank] = value
                else:
                    failures.append(f"Rank {rank} raised:\n{value}")
        failures += [f"Rank {rank} has not ended after {timeout:g} s." for rank in waiting]
        if failures:
            raise AssertionError("\n".join(failures))
        return self.results_so_far

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for rank, process in self.processes.items():
            process.kill()
            process.join()
            process.close()
            self._pipes[rank].close()


def run_ranks(size: int, target: Target, *args: Any, timeout: float = 200.0) -> list[Any]:
    """Runs `target(store, rank, size, *args)` in `size` processes, and returns results by rank."""
    with Ranks(size, target, *args) as ranks:
        results = ranks.results(timeout)
    assert sorted(results) == list(range(size)), f"only ranks {sorted(results)} returned"
    return [results[rank] for rank in range(size)]


def strategy_of(
    rank: int, ports: list[int], num_devices: int, **settings: Any
) -> uo.MultiWorkerMirroredStrategy:
    """Makes the strategy of one worker; there are as many workers as ports."""
    resolver = uo.cluster_resolver.SimpleClusterResolver(
        {"worker": [f"127.0.0.1:{port}" for port in ports]}, task_type="worker", task_id=rank
    )
    devices = [f"cpu:{i}" for i in range(num_devices)]
    options = uo.experimental.CommunicationOptions(timeout_seconds=60)
    return uo.MultiWorkerMirroredStrategy(resolver, options, devices=devices, **settings)


def _run(
    pipe: Connection,
    port: int,
    target: Target,
    rank: int,
    size: int,
    args: tuple[Any, ...],
    started: list[int],
) -> None:
    # There are more ranks than cores.
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    try:
        store = TCPStore("127.0.0.1", port, timeout=limit, wait_for_workers=False)
        # The time that a test gives its ranks is not for processes to start.
        store.set(f"started/{rank}", "")
        store.wait([f"started/{one}" for one in started])
        pipe.send((True, target(store, rank, size, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def outcome(call: Callable[[], Any]) -> Outcome:
    """The error that `call` must raise: its type, message and ranks, and when it came."""
    start = time.monotonic()
    try:
        call()
    except CommunicationError as error:
        return type(error).__name__, str(error), error.ranks, time.monotonic() - start
    raise AssertionError("nothing was raised")
