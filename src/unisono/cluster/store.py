"""The store at which the workers of a job find each other: rank 0 serves it, the others connect."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

# torch imports the stores there for others to use, but does not say so to type checkers.
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from unisono.cluster.membership import Membership
from unisono.communicators import STORE_ERRORS
from unisono.errors import CommunicationError, WorkerTimeoutError

_PAUSE_SECONDS = 0.1
_FIRST_TRY_SECONDS = 1.0


def open_store(membership: Membership, timeout_seconds: float) -> Store:
    """Returns the store of a job, and with it the first connection between its workers.

    Where the launcher keeps a store, everybody connects to that one. A process that is alone gets
    a store of its own without any network. Rank 0 listens on all interfaces of its host.

    Args:
        membership: The place of this process among the workers.
        timeout_seconds: How long to try, and how long the store then waits for a key.
    """
    # Not the job: a worker of another job shall find the keys, and be told that it is wrong here.
    prefix = f"unisono/{membership.restart_count}"
    return PrefixStore(prefix, _store(membership, timeout_seconds))


def _store(membership: Membership, timeout_seconds: float) -> Store:
    if membership.size == 1:
        return HashStore()
    if membership.rank == membership.coordinator_rank and not membership.uses_existing_store:
        return _serve(membership, timeout_seconds)
    return _connect(membership, timeout_seconds)


def _serve(membership: Membership, timeout_seconds: float) -> Store:
    address, who = membership.coordinator, f"Rank {membership.coordinator_rank}"
    _check_that_the_host_is_known(membership)
    try:
        return _tcp_store(membership, timeout_seconds, is_master=True)
    except DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise CommunicationError(
                f"{who} must serve the store of the job at {address}, but port "
                f"{membership.coordinator_port} is in use on this host: another program or another "
                "job has it. End that one, or give this job another port.",
                ranks=[membership.coordinator_rank],
            ) from None
        raise CommunicationError(
            f"{who} must serve the store of the job at {address}, but cannot: {error} Check that "
            f"{membership.coordinator_host} is this host, {socket.gethostname()}.",
            ranks=[membership.coordinator_rank],
        ) from None


def _connect(membership: Membership, timeout_seconds: float) -> Store:
    """Tries again and again, from Python, where Ctrl-C is heard."""
    deadline = time.monotonic() + timeout_seconds
    patience = _FIRST_TRY_SECONDS
    while True:
        _wait_for_somebody_to_listen(membership, timeout_seconds, deadline)
        try:
            # torch may take more than twice as long. A busy or paused server needs longer tries.
            left = deadline - time.monotonic()
            store = _tcp_store(membership, min(patience, max(left / 2, 0.5)), is_master=False)
        except STORE_ERRORS as error:
            if time.monotonic() < deadline:
                patience *= 2
                continue
            raise WorkerTimeoutError(
                f"Something listens at {membership.coordinator}, but does not answer as the store "
                f"of a job: {error} Check the address of rank 0.",
                ranks=[membership.coordinator_rank],
            ) from None
        store.set_timeout(timedelta(seconds=timeout_seconds))
        return store


def _tcp_store(membership: Membership, timeout_seconds: float, *, is_master: bool) -> TCPStore:
    return TCPStore(
        membership.coordinator_host,
        membership.coordinator_port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
    )


def _check_that_the_host_is_known(membership: Membership) -> None:
    try:
        socket.getaddrinfo(membership.coordinator_host, membership.coordinator_port)
    except OSError as error:
        raise CommunicationError(
            f"Rank {membership.coordinator_rank} must serve the store of the job at "
            f"{membership.coordinator}, but this host "
            f"({socket.gethostname()}) does not know the name: {error}. Write an address that all "
            "workers can reach.",
            ranks=[membership.coordinator_rank],
        ) from None


def _wait_for_somebody_to_listen(
    membership: Membership, timeout_seconds: float, deadline: float
) -> None:
    """Tries until there is a connection, and can tell the last reason why there is none."""
    address = (membership.coordinator_host, membership.coordinator_port)
    while True:
        try:
            remaining = max(deadline - time.monotonic(), _PAUSE_SECONDS)
            socket.create_connection(address, timeout=remaining).close()
            return
        except OSError as error:
            reason = error
        if time.monotonic() >= deadline:
            raise WorkerTimeoutError(
                f"Rank {membership.rank} of {membership.size} has tried for {timeout_seconds:g} s "
                f"to reach rank {membership.coordinator_rank} at {membership.coordinator}, and "
                f"nobody answers: {reason}. Check that it runs, that this is its address, and that "
                "no firewall is in between.",
                ranks=[membership.coordinator_rank],
            )
        time.sleep(_PAUSE_SECONDS)
