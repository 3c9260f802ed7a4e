"""The store at which the workers of a job find each other: rank 0 serves it, the others connect."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import Store

from unisono.cluster.membership import Membership
from unisono.communicators import JOB_TOKEN, STORE_ERRORS
from unisono.communicators.greeting import RefusedError, call, has_token, job_key
from unisono.communicators.job_store import JobStore, local_store, serve_store, store_at
from unisono.communicators.sockets import encryption, listening, listening_everywhere
from unisono.communicators.stores import coordinator_address, in_thread, tcp_store
from unisono.errors import CommunicationError, JobMismatchError, WorkerTimeoutError

LISTEN = "UNISONO_LISTEN"
_PAUSE_SECONDS = 0.1
_log = logging.getLogger("unisono")


def open_store(membership: Membership, timeout_seconds: float) -> JobStore:
    """Returns the store of a job, and with it the first connection between its workers.

    Rank 0 listens at its address in the cluster, or at the one that UNISONO_LISTEN names. Where the
    launcher, or torch's default group, has taken that port for its own store, rank 0 takes
    another one and says there which. A process that is alone gets a store without any network.

    The store lives as long as what is returned: prefixes of it do not keep it.
    """
    if membership.size == 1:
        return local_store()
    door = _Door(membership, timeout_seconds)
    is_served_here = membership.rank == membership.coordinator_rank
    store = door.serve() if is_served_here else door.connect()
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


class _Door:
    """Where the store of a job is, and what one must know to enter."""

    def __init__(self, membership: Membership, timeout_seconds: float) -> None:
        self._membership = membership
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._name = f"unisono/{membership.job}/{membership.restart_count}"
        self._key = job_key(self._name)
        self._keys = encryption()
        self._host, self._port = membership.coordinator.host, membership.coordinator.port
        # The program, or Ray, may have made a process group before.
        has_group = distributed.is_available() and distributed.is_initialized()
        group: Any = distributed.distributed_c10d._get_default_store() if has_group else None
        at = None if group is None else coordinator_address(group)
        self._group = group if at and at[1] == self._port else None
        # The port of rank 0 may be that of another store, where rank 0 says where its own is.
        self._uses_other = membership.uses_existing_store or self._group is not None

    def serve(self) -> JobStore:
        listener = self._listener(0 if self._uses_other else self._port)
        store = serve_store(self._host, listener, self._key, self._keys)
        if self._uses_other:
            try:
                self._of_other(lambda other: other.set(self._name, str(store.port)))
            except STORE_ERRORS as error:
                raise self._unreachable(str(error)) from None
        if not has_token():
            _log.log(
                logging.INFO if self._host in ("localhost", "127.0.0.1") else logging.WARNING,
                "This job has no %s: everybody who reaches %s port %d can join it, read what it "
                "computes, and end it. Give all workers the same secret text.",
                JOB_TOKEN,
                self._host,
                store.port,
            )
        return store

    def _listener(self, port: int) -> socket.socket:
        told = os.environ.get(LISTEN)
        try:
            return listening(told or self._host, port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and not told:
                # A name that a network translates: of a service, or of the host of a container.
                _log.info("%s is no address of this host: listening on all.", self._host)
                return listening_everywhere(port)
            raise self._cannot_listen(told, error) from None

    def _cannot_listen(self, told: str | None, error: OSError) -> CommunicationError:
        at = self._membership.coordinator
        if error.errno == errno.EADDRINUSE:
            why = (
                f"port {self._port} is already in use on this host. End the "
                "program that uses it, or give this job another port."
            )
        elif told:
            why = f"cannot listen at {LISTEN}={told!r}: {error}. Set it to an address of this host."
        else:
            why = (
                f"this host ({socket.gethostname()}) cannot listen there: {error}. Use an address "
                "of this host that all workers can reach."
            )
        rank = self._membership.coordinator_rank
        return CommunicationError(
            f"Rank {rank} must serve the store of the job at {at}, but {why}", ranks=[rank]
        )

    def connect(self) -> JobStore:
        """Tries again and again until the deadline: rank 0 may start later."""
        rank = self._membership.rank
        while True:
            try:
                port = self._port
                if self._uses_other:
                    port = int(self._of_other(lambda other: other.get(self._name)) or 0)
                address = self._host, port
                return store_at(address, call(address, self._key, rank, self._keys, self._deadline))
            except RefusedError:
                raise JobMismatchError(
                    f"Rank {rank} (process {os.getpid()} on {socket.gethostname()}) was refused: "
                    f"rank 0 belongs to another job or has another {JOB_TOKEN}. Give all workers "
                    "the same token, and check that no other job uses the address of rank 0, "
                    f"{self._membership.coordinator}.",
                    ranks=[rank],
                ) from None
            except (OSError, *STORE_ERRORS) as error:
                if time.monotonic() >= self._deadline:
                    raise self._unreachable(str(error)) from None
            time.sleep(_PAUSE_SECONDS)

    def _of_other(self, ask: Callable[[Store], bytes | None]) -> bytes | None:
        left = max(self._deadline - time.monotonic(), _PAUSE_SECONDS)
        return in_thread(lambda: ask(self._group or tcp_store(self._host, self._port, left)), left)

    def _unreachable(self, reason: str) -> WorkerTimeoutError:
        one = self._membership
        return WorkerTimeoutError(
            f"Rank {one.rank} of {one.size} tried for {self._timeout_seconds:g} s to reach rank "
            f"{one.coordinator_rank} at {one.coordinator}, but the store of this job did not "
            f"answer: {reason.splitlines()[0]}. Check that rank {one.coordinator_rank} runs, that "
            "this is its address, and that no firewall blocks it.",
            ranks=[one.coordinator_rank],
        )
