"""Ranks that share memory, and the errors that they end with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from processes.harness import Ranks
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.shared_memory import SharedMemoryCommunicator
from unisono.errors import (
    CommunicationError,
    ContextError,
)

TIMEOUT = 200.0


class Report(NamedTuple):
    """An error as another process can tell it."""

    kind: type[BaseException]
    text: str
    ranks: tuple[int, ...]
    seconds: float


def report(call: Callable[[], object]) -> Report:
    began = time.monotonic()
    try:
        call()
    except (CommunicationError, ContextError, KeyboardInterrupt) as error:
        ranks = getattr(error, "ranks", ())
        return Report(type(error), str(error), ranks, time.monotonic() - began)
    raise AssertionError("the call ended well")


def join(
    store: Store, rank: int, size: int, key: str = "first", **options: Any
) -> SharedMemoryCommunicator:
    return SharedMemoryCommunicator(
        PrefixStore(key, store), rank, size, **{"timeout_seconds": TIMEOUT, **options}
    )


def kill(ranks: Ranks, rank: int, number: signal.Signals) -> None:
    pid = ranks.processes[rank].pid
    assert pid is not None
    os.kill(pid, number)
