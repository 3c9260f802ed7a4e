"""The store through which ranks find each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from unisono.communicators.headers import ranks_in_words
from unisono.communicators.job_store import JobStore
from unisono.errors import (
    CommunicationError,
    JobMismatchError,
    UnisonoError,
    WorkerLostError,
    WorkerTimeoutError,
)

_T = TypeVar("_T")
DEFAULT_TIMEOUT_SECONDS = 300.0
_LOOK_SECONDS = 0.1
# How often a rank that connects asks whether all ranks are well.
_CHECK_SECONDS = 1.0
# How long a rank that gives up waits for others to say that they do, too.
_GRACE_SECONDS = 2.0
# What a store raises that cannot be reached, or does not answer.
STORE_ERRORS = (DistNetworkError, DistStoreError)


class Countdown:
    """The time that is left for all steps of joining together.

    Args:
        least: What is left for every step, however long those before it took: all ranks have come
            by then, and a step that all of them make takes a moment.
    """

    def __init__(self, seconds: float, least: float = 0.1) -> None:
        self._deadline = time.monotonic() + seconds
        self._least = least

    def seconds(self) -> float:
        """Returns how much time is left."""
        return max(self._least, self._deadline - time.monotonic())

    def is_over(self) -> bool:
        """Whether none is left."""
        return time.monotonic() > self._deadline


def say_to_all(
    store: Store,
    rank: int,
    size: int,
    text: str,
    *,
    timeout_seconds: float,
    meanwhile: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Publishes `text` as what `rank` has to say, and returns what all ranks say.

    A store, or a prefix of it, serves one call: a rank that comes twice belongs to another job.

    Args:
        meanwhile: Called again and again while others are missing. It returns whether to give up.
    """
    with translated_store_errors():
        if store.add(f"came/{rank}", 1) > 1:
            raise JobMismatchError(
                f"Rank {rank} is used twice: two workers have this rank, or the store belongs to "
                "an earlier job. Give every worker its own rank, and every job its own address or "
                "prefix.",
                [rank],
            )
        store.set(f"says/{rank}", f"{size}/{text}")
        keys = [f"says/{other}" for other in range(size)]
        has_come = have_come(store, keys, timeout_seconds, meanwhile)
        if missing := [r for r, key in enumerate(keys) if not has_come and not store.check([key])]:
            raise WorkerTimeoutError(
                f"Rank {rank} waited {round(timeout_seconds, 1):g} s for {ranks_in_words(missing)} "
                f"of {size} to start. Check their logs, or raise `timeout_seconds` if they start "
                "slowly.",
                missing,
            )
        said = [one.decode().split("/", 1) for one in store.multi_get(keys)]
    sizes = {other: int(told) for other, (told, _) in enumerate(said)}
    if odd := [other for other in sizes if sizes[other] != size]:
        told = ", ".join(f"rank {other} counts {sizes[other]}" for other in odd)
        raise JobMismatchError(
            f"Rank {rank} counts {size} ranks, but {told}. Give all workers the same cluster.", odd
        )
    return [text for _, text in said]


def have_come(
    store: Store,
    keys: list[str],
    timeout_seconds: float,
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Waits until all keys are in the store or the wait is over, and returns whether they are."""
    left = Countdown(timeout_seconds)
    pause = 0.001
    # In short looks: `store.wait` does not hear Ctrl-C.
    while not store.check(keys):
        if left.is_over() or is_over():
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    return True


def connected(
    store: Store,
    rank: int,
    size: int,
    engine: str,
    make: Callable[[threading.Event], _T],
    seconds: float,
    check_health: Callable[[float], None] = lambda _: None,
) -> _T:
    """Returns what `make` connects all ranks with, or raises an error that names the missing ones.

    Engines do not hear Ctrl-C while they connect. They name one rank at most, which often has
    itself waited in vain for another. So a thread connects, and every rank says through the store
    that it has connected or given up. Missing ranks say neither.

    Args:
        make: Connects them. It gets an event that is set when nobody waits for it any more.
        check_health: Raises a `CommunicationError` if a rank is lost, in so many seconds.
    """
    is_over = threading.Event()
    outcome = in_background(lambda: make(is_over), f"unisono {engine.lower()}")
    left, next_check = Countdown(seconds), Countdown(_CHECK_SECONDS)
    with translated_store_errors():
        try:
            while not wait([outcome], _LOOK_SECONDS).done:
                if left.is_over() or store.check(["given up"]):
                    break
                if next_check.is_over():
                    check_health(left.seconds())
                    next_check = Countdown(_CHECK_SECONDS)
        except CommunicationError:
            # The others learn of a lost rank in the same way. One that has given up looks lost.
            if not store.check(["given up"]):
                raise
        except BaseException:
            with suppress(*STORE_ERRORS):
                store.set("given up", "")
            raise
        finally:
            is_over.set()
        is_done = outcome.done()
        why = outcome.exception() if is_done else None
        if is_done and why is None:
            store.set(f"{rank}", "")
            return outcome.result()
        store.set("given up", "")
        if isinstance(why, UnisonoError):
            raise why
        store.set(f"{rank}", "")
        others = [other for other in range(size) if other != rank]
        have_come(store, [f"{other}" for other in others], _GRACE_SECONDS)
        missing = [other for other in others if not store.check([f"{other}"])]
    raise WorkerTimeoutError(
        f"Rank {rank} waited up to {seconds:.3g} s for {ranks_in_words(missing or others)} of "
        f"{size} to connect through {engine}{f' ({why})' if why else ''}. All ranks had announced "
        "themselves before. Check the logs of the missing ranks, the network and the firewall.",
        missing,
    ) from why


@contextmanager
def translated_store_errors() -> Iterator[None]:
    """Turns a lost connection to the store into a `WorkerLostError`, and silence into a timeout."""
    try:
        yield
    except STORE_ERRORS as error:
        raise _coordinator_failure(error) from error


def _coordinator_failure(error: Exception) -> CommunicationError:
    is_silent = isinstance(error, DistStoreError)
    kind = WorkerTimeoutError if is_silent else WorkerLostError
    what = "does not answer" if is_silent else "cannot be reached"
    failure = kind(
        f"The coordinator, which usually runs beside rank 0, {what} "
        f"({str(error).splitlines()[0]}). Check the log of rank 0 and the network to its host.",
        [0],
    )
    failure.is_of_all = True
    return failure


def coordinator_store(store: Store) -> Any:
    """Returns the store of which `store` is a prefix."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def coordinator_address(store: Store) -> tuple[str, int] | None:
    """Returns host and port of the store, or None if it is none of the network."""
    inner = coordinator_store(store)
    return (inner.host, inner.port) if isinstance(inner, (JobStore, TCPStore)) else None


def tcp_store(host: str, port: int, seconds: float, **options: Any) -> TCPStore:
    """Returns a connection to a store of torch."""
    limit = timedelta(seconds=seconds)
    return TCPStore(host, port, timeout=limit, wait_for_workers=False, **options)


def in_thread(call: Callable[[], _T], timeout_seconds: float) -> _T:
    """Makes a call that hears neither Ctrl-C nor deadlines, so that the caller does."""
    outcome = in_background(call)
    if not wait([outcome], timeout_seconds).done:
        raise DistStoreError(f"torch's store has not answered for {timeout_seconds:g} s.")
    return outcome.result()


def in_background(call: Callable[[], _T], name: str = "unisono call") -> Future[_T]:
    """Makes a call in a thread that nothing waits for when the program ends."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
