"""One rank: a process that runs torch's tests, one after another."""

from __future__ import annotations

import datetime
import functools
import os
import traceback
import unittest
import warnings
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import torch
from torch import distributed

from torch_suite.catalog import SUITES, Suite

# torch gives its own ranks as long.
_GROUP_SECONDS = 60


class Report(NamedTuple):
    """What a rank says about a test.

    Attributes:
        verdict: "passed", "skipped" or "failed".
        why: The reason, unless it passed.
        has_used_group: Whether the test had a process group.
    """

    verdict: str
    why: str
    has_used_group: bool


class _Seat(NamedTuple):
    """Where a rank sits."""

    rank: int
    barrier: Barrier
    suite: Suite
    case: Any


def serve(
    pipe: Connection, rank: int, suite: str, backend: str, barrier: Barrier, folder: str
) -> None:
    """Runs each test whose name comes through the pipe, and sends a `Report`."""
    # Nobody reads what a test prints.
    output = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["TEMP_DIR"] = folder
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seat = _Seat(rank, barrier, SUITES[suite], _case(SUITES[suite]))
    groups = _count_groups(backend)
    while (given := pipe.recv()) is not None:
        groups.clear()
        verdict, why = _run(seat, *given)
        pipe.send(Report(verdict, why, bool(groups)))


def _case(suite: Suite) -> Any:
    """torch's class, without the part that starts processes for each test."""
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
        TensorPipeRpcAgentTestFixture,
    )

    loaded = suite.load()
    fixture = () if suite.has_group else (TensorPipeRpcAgentTestFixture,)
    return type("Case", (loaded, *fixture, TestCase), {"world_size": suite.size})


def _count_groups(backend: str) -> list[str]:
    """Makes every group that asks for Gloo one of `backend`, and lists the calls that did."""
    calls: list[str] = []

    def replaced(make: Any) -> Any:
        @functools.wraps(make)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(make.__name__)
            if str(kwargs.get("backend")).lower() == "gloo":
                kwargs["backend"] = backend
            given = [backend if isinstance(arg, str) and arg == "gloo" else arg for arg in args]
            return make(*given, **kwargs)

        return wrapper

    module: Any = distributed.distributed_c10d
    for name in ("init_process_group", "new_group"):
        both = replaced(getattr(module, name))
        setattr(module, name, both)
        setattr(distributed, name, both)
    return calls


def _run(seat: _Seat, name: str, file_name: str) -> tuple[str, str]:
    self = seat.case(name)
    self.rank, self.file_name = seat.rank, file_name
    # torch's tests meet through files, which takes longer.
    self._barrier = lambda *_, timeout=_GROUP_SECONDS, **__: seat.barrier.wait(timeout)
    torch.manual_seed(0)
    try:
        if seat.suite.has_group:
            _join(seat, self, name)
        self._barrier()
        getattr(self, name)()
        self._barrier()
    except unittest.SkipTest as reason:
        return _ended("skipped", str(reason))
    except SystemExit as end:
        # This is how torch's decorators skip.
        return _ended("skipped", f"exit {end.code}")
    except BaseException:
        seat.barrier.abort()
        return "failed", traceback.format_exc()[-3000:]
    return _ended("passed", "")


def _join(seat: _Seat, self: Any, name: str) -> None:
    from torch.testing._internal.distributed import distributed_test

    type(self).init_method = f"file://{self.file_name}"
    # A test that makes the default group again uses this file.
    distributed_test.INIT_METHOD = f"{self.init_method}-again"
    distributed.init_process_group(
        init_method=self.init_method,
        backend="gloo",
        world_size=seat.suite.size,
        rank=seat.rank,
        timeout=datetime.timedelta(
            seconds=distributed_test.CUSTOM_PG_TIMEOUT.get(name, _GROUP_SECONDS)
        ),
    )


def _ended(verdict: str, why: str) -> tuple[str, str]:
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return verdict, why
