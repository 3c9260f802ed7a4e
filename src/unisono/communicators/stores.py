"""The store through which ranks find each other: who has come, and a connection of one's own."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from unisono.communicators.headers import ranks_in_words
from unisono.errors import JobMismatchError, WorkerLostError, WorkerTimeoutError

DEFAULT_TIMEOUT_SECONDS = 300.0
# What a store raises that cannot be reached, or does not answer.
STORE_ERRORS = (DistNetworkError, DistStoreError)
_one_at_a_time = threading.Lock()


def say_to_all(
    store: Store, rank: int, size: int, text: str, *, timeout_seconds: float
) -> list[str]:
    """Publishes `text` as what `rank` has to say, and returns what all ranks say.

    A store, or a prefix of it, serves one call: a rank that comes twice belongs to another job.
    """
    with translated_store_errors():
        if store.add(f"came/{rank}", 1) > 1:
            raise JobMismatchError(
                f"Rank {rank} has come twice to one store: two workers have this rank, or the "
                "store was used before. Give every worker its own rank, and every job its own "
                "address or prefix.",
                [rank],
            )
        store.set(f"says/{rank}", f"{size}/{text}")
        _wait_for_all(store, rank, size, timeout_seconds)
        said = [store.get(f"says/{other}").decode().split("/", 1) for other in range(size)]
    sizes = {other: int(told) for other, (told, _) in enumerate(said)}
    if odd := [other for other in sizes if sizes[other] != size]:
        told = ", ".join(f"rank {other} counts {sizes[other]}" for other in odd)
        raise JobMismatchError(
            f"Rank {rank} counts {size} ranks, but {told}. Start all workers with one cluster.", odd
        )
    return [text for _, text in said]


def _wait_for_all(store: Store, rank: int, size: int, timeout_seconds: float) -> None:
    keys = {other: f"says/{other}" for other in range(size)}
    deadline = time.monotonic() + timeout_seconds
    pause = 0.001
    # In short looks, so that Ctrl-C is heard.
    while not store.check(list(keys.values())):
        if time.monotonic() > deadline:
            missing = [other for other, key in keys.items() if not store.check([key])]
            raise WorkerTimeoutError(
                f"Rank {rank} waited {timeout_seconds:g} s for {ranks_in_words(missing)} of {size} "
                "to start. Look at their logs; raise `timeout_seconds` if they start slowly.",
                missing,
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.1)


@contextmanager
def translated_store_errors() -> Iterator[None]:
    """Turns a lost connection to the store into a `WorkerLostError`."""
    try:
        yield
    except STORE_ERRORS as error:
        raise coordinator_lost(str(error)) from error


def coordinator_lost(why: str) -> WorkerLostError:
    """The error for a store that does not answer."""
    return WorkerLostError(
        "The coordinator, which usually runs beside rank 0, cannot be reached "
        f"({why.splitlines()[0]}). Look at the log of rank 0 and at the network to its host.",
        [0],
    )


def coordinator_address(store: Store) -> tuple[str, int] | None:
    """Returns host and port of the store, or None if it is none of the network."""
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return (inner.host, inner.port) if isinstance(inner, TCPStore) else None


class OwnConnection:
    """A connection to the store that nobody else uses, and that can be cut.

    A question to a store that does not answer, on a host that was stopped or cut off, would wait
    until the network gives up, with nothing in torch to end it.
    """

    def __init__(self, store: Store, *, timeout_seconds: float) -> None:
        # Kept for as long as this one is used: the server may end with the store that has begun it.
        self._source = store
        self._port = (coordinator_address(store) or ("", 0))[1]
        with _one_at_a_time:
            before = self._sockets()
            # Before torch 2.8 a store could not be cloned, and its users take turns.
            self.store = store.clone() if hasattr(store, "clone") else store
            self._own = self._sockets() - before
        if self._own:
            self.store.set_timeout(timedelta(seconds=timeout_seconds))

    def cut(self) -> None:
        """Ends every question that is under way, with an error."""
        for number, _ in self._own & self._sockets():
            with socket.socket(fileno=os.dup(number)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)

    def _sockets(self) -> set[tuple[int, int]]:
        """The sockets of this process that are connected to the store: descriptor and inode."""
        if not self._port or not os.path.isdir("/proc/self/fd"):
            return set()
        numbers = [
            n for n in map(int, os.listdir("/proc/self/fd")) if _port_of_peer(n) == self._port
        ]
        return {(number, os.fstat(number).st_ino) for number in numbers}


def _port_of_peer(number: int) -> int | None:
    """Returns the port that a descriptor is connected to, if it is a socket of the network."""
    try:
        if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(number)) as duplicate:
            peer = duplicate.getpeername()
    except OSError:
        # Not connected, or closed by another thread meanwhile.
        return None
    return peer[1] if isinstance(peer, tuple) else None
