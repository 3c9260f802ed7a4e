"""The store through which ranks find each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from unisono.communicators.headers import ranks_in_words
from unisono.errors import JobMismatchError, WorkerLostError, WorkerTimeoutError

DEFAULT_TIMEOUT_SECONDS = 300.0
# What a store raises that cannot be reached, or does not answer.
STORE_ERRORS = (DistNetworkError, DistStoreError)


class Countdown:
    """The time that is left for all steps of joining together.

    Args:
        seconds: How much there is.
        least: What is left for every step, however long those before it took: all ranks have come
            by then, and a step that all of them make takes a moment.
    """

    def __init__(self, seconds: float, least: float = 0.1) -> None:
        self._deadline = time.monotonic() + seconds
        self._least = least

    def seconds(self) -> float:
        """Returns how much time is left."""
        return max(self._least, self._deadline - time.monotonic())


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
    if not have_come(store, list(keys.values()), timeout_seconds):
        missing = [other for other, key in keys.items() if not store.check([key])]
        raise WorkerTimeoutError(
            f"Rank {rank} waited {timeout_seconds:g} s for {ranks_in_words(missing)} of {size} "
            "to start. Look at their logs; raise `timeout_seconds` if they start slowly.",
            missing,
        )


def have_come(store: Store, keys: list[str], timeout_seconds: float) -> bool:
    """Waits until all keys are in the store, and returns whether they are."""
    deadline = time.monotonic() + timeout_seconds
    pause = 0.001
    # In short looks: `store.wait` does not hear Ctrl-C.
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    return True


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
