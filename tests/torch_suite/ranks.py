"""Ranks that stay from test to test."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_suite.catalog import SUITES, modules, set_environment

if TYPE_CHECKING:
    from torch_suite.rank import Report

_SECONDS_PER_TEST = 120.0
# How long other ranks may take to report after one has failed.
_SECONDS_AFTER_FAILURE = 5.0


class Outcome(NamedTuple):
    """What became of one test.

    Attributes:
        name: The test.
        verdict: "passed", "skipped", "failed" or "hung".
        why: What the ranks said about it.
        has_used_group: Whether it had a process group.
        seconds: How long it took.
    """

    name: str
    verdict: str
    why: str
    has_used_group: bool
    seconds: float


def run(suite: str, names: Iterable[str], backend: str) -> Iterator[Outcome]:
    """Runs tests of a class over `backend`, which they get wherever they ask for Gloo."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("barrier", "test_dir", "init_dir"):
            (folder / part).mkdir()
        ranks = _Ranks(suite, backend, folder)
        try:
            for number, test in enumerate(names):
                begin = time.monotonic()
                verdict, why, has_used_group = ranks.run(test, folder / f"store-{number}")
                yield Outcome(test, verdict, why, has_used_group, time.monotonic() - begin)
                # RPC leaves more behind in a process than a group does.
                if verdict in ("failed", "hung") or not SUITES[suite].has_group:
                    ranks.kill()
                    ranks = _Ranks(suite, backend, folder)
        finally:
            ranks.kill()


class _Ranks:
    def __init__(self, suite: str, backend: str, folder: Path) -> None:
        self._size = SUITES[suite].size
        set_environment(self._size)
        # Ranks are forked from a process that has imported the tests, which takes seconds.
        processes: Any = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["torch._dynamo", "unisono.backend", *modules()])
        # Ranks find it by a name that is gone with the object.
        self._barrier = processes.Barrier(self._size)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self._size):
            ours, theirs = processes.Pipe()
            arguments = (theirs, rank, suite, backend, self._barrier, str(folder))
            process = processes.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, name: str, store: Path) -> tuple[str, str, bool]:
        for pipe in self._pipes:
            pipe.send((name, str(store)))
        reports = self._reports(time.monotonic() + _SECONDS_PER_TEST)
        missing = [rank for rank in range(self._size) if rank not in reports]
        verdicts = {report.verdict for report in reports.values()}
        why = "\n".join(
            f"rank {rank}: {report.why}" for rank, report in sorted(reports.items()) if report.why
        )
        has_used_group = any(report.has_used_group for report in reports.values())
        if "failed" in verdicts:
            return "failed", why, has_used_group
        if missing:
            return "hung", f"no report from ranks {missing}\n{why}", has_used_group
        return ("skipped" if "skipped" in verdicts else "passed"), why, has_used_group

    def _reports(self, deadline: float) -> dict[int, Report]:
        from torch_suite.rank import Report

        reports: dict[int, Report] = {}
        while len(reports) < self._size and (left := deadline - time.monotonic()) > 0:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in reports]
            for ready in wait(waiting, left):
                rank = next(i for i, pipe in enumerate(self._pipes) if pipe is ready)
                try:
                    reports[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    reports[rank] = Report("failed", "the process ended", has_used_group=True)
                if reports[rank].verdict == "failed":
                    deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_FAILURE)
        return reports

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _serve(*args: Any) -> None:
    from torch_suite.rank import serve

    serve(*args)
