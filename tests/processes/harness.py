"""Ranks as real processes, which end with the test whatever happens."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

Target = Callable[..., Any]


class Ranks:
    """Processes that run `target(store, rank, size, *args)`, each with a store of its own.

    The store lives in the process of the test, so no rank is needed to reach it.
    """

    def __init__(self, size: int, target: Target, *args: Any, skip: tuple[int, ...] = ()) -> None:
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.processes: dict[int, SpawnProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._results: dict[int, Any] = {}
        for rank in set(range(size)) - set(skip):
            self._pipes[rank], theirs = context.Pipe(duplex=False)
            arguments = (theirs, self._server.port, target, rank, size, args)
            self.processes[rank] = context.Process(target=_run, args=arguments, daemon=True)
            self.processes[rank].start()
            theirs.close()

    @property
    def store(self) -> Store:
        """The store that all ranks share."""
        return self._server

    def results(
        self, timeout: float = 60.0, *, of: tuple[int, ...] | None = None
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
                    outcome, value = waiting.pop(rank).recv()
                except EOFError:
                    continue
                if outcome == "returned":
                    self._results[rank] = value
                else:
                    failures.append(f"rank {rank} raised\n{value}")
        failures += [f"rank {rank} has not ended after {timeout:g} s" for rank in waiting]
        if failures:
            raise AssertionError("\n".join(failures))
        return self._results

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes.values():
            pipe.close()


def run_ranks(size: int, target: Target, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs `target(store, rank, size, *args)` in `size` processes, and returns results by rank."""
    with Ranks(size, target, *args) as ranks:
        results = ranks.results(timeout)
        assert sorted(results) == list(range(size)), f"only ranks {sorted(results)} returned"
        return [results[rank] for rank in range(size)]


def _run(
    pipe: Connection, port: int, target: Target, rank: int, size: int, args: tuple[Any, ...]
) -> None:
    # There are more ranks than cores.
    torch.set_num_threads(1)
    try:
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=False,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
        )
        pipe.send(("returned", target(store, rank, size, *args)))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    finally:
        pipe.close()
