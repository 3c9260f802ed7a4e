"""Memory without a name that the processes of one host share, and how they come by it.

Rank 0 makes the memory and listens on a socket of the host. The address of the socket and a secret
travel through the store of the job; who connects as the same user and knows the secret is given a
descriptor. Nothing has a name in a file system, so nothing can stay behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from unisono.communicators.stores import have_come
from unisono.errors import JobMismatchError, WorkerLostError, WorkerTimeoutError

# How long a guest that finds nobody at the address looks for a newer one.
_GRACE_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_MAX_MESSAGE = 4096


class Segment(NamedTuple):
    """The descriptor of shared memory, and how much of it each rank may allocate."""

    fd: int
    arena_bytes: int


def create_segment(num_bytes: int) -> int:
    """Returns a descriptor of new memory of fixed size, of which pages are used when touched."""
    fd = os.memfd_create("unisono", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, num_bytes)
    # A process that shrank it would end the others with SIGBUS.
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Host:
    """Rank 0, which hands the memory out.

    Args:
        store: Where the others look for the invitation.
        key: Under which name. It is free again when all have come.
        size: How many ranks there are.
    """

    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._missing = set(range(1, size))
        self._size = size
        self._token = secrets.token_hex(32)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        address = f"unisono-{secrets.token_hex(16)}"
        self._socket.bind(f"\0{address}")
        self._socket.listen(size)
        store.set(key, json.dumps({"address": address, "token": self._token}))

    def hand_out(
        self, segment: Segment, timeout_seconds: float, check_health: Callable[[], None]
    ) -> None:
        """Returns when every other rank has the memory. `check_health` is called now and then."""
        deadline = time.monotonic() + timeout_seconds
        with self._socket:
            while self._missing:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._timed_out(timeout_seconds)
                self._socket.settimeout(min(left, _LOOK_SECONDS))
                try:
                    guest, _ = self._socket.accept()
                except TimeoutError:
                    check_health()
                    continue
                with guest:
                    guest.settimeout(_GRACE_SECONDS)
                    self._receive(guest, segment)
        self._store.delete_key(self._key)

    def _receive(self, guest: socket.socket, segment: Segment) -> None:
        try:
            request = _read(guest.recv(_MAX_MESSAGE))
        except OSError:
            return  # It went away, and may come again.
        known = hmac.compare_digest(str(request.get("token", "")), self._token)
        if not known or _user_of(guest) != os.getuid():
            return
        rank, size = request.get("rank"), request.get("size")
        if size != self._size or rank not in self._missing:
            text = (
                f"Rank {rank} of {size} came to a job of {self._size} ranks that waits for "
                f"{_words(self._missing)}. Start each rank of one job once, and tell all the same "
                "number of ranks."
            )
            with contextlib.suppress(OSError):
                guest.send(json.dumps({"refusal": text}).encode())
            raise JobMismatchError(text, [rank] if isinstance(rank, int) else [])
        answer = json.dumps({"arena_bytes": segment.arena_bytes}).encode()
        with contextlib.suppress(OSError):
            socket.send_fds(guest, [answer], [segment.fd])
            self._missing.discard(rank)

    def _timed_out(self, timeout_seconds: float) -> WorkerTimeoutError:
        return WorkerTimeoutError(
            f"Rank 0 waited {timeout_seconds:g} s for {_words(self._missing)} of {self._size} to "
            "join its shared memory. Start them on this host, or raise `timeout_seconds` if they "
            "only need longer.",
            sorted(self._missing),
        )


def receive_segment(
    store: Store, key: str, rank: int, size: int, timeout_seconds: float
) -> Segment:
    """Returns the memory that rank 0 hands out."""
    deadline = time.monotonic() + timeout_seconds
    refused_at = None
    while True:
        invitation = _await_invitation(store, key, deadline)
        if invitation is None:
            raise WorkerTimeoutError(
                f"Rank {rank} waited {timeout_seconds:g} s for rank 0 to invite it under the key "
                f"{key!r}, and to answer. Start rank 0 with the same key, or raise "
                "`timeout_seconds` if it only needs longer.",
                [0],
            )
        segment = _ask(invitation, rank, size, deadline)
        if segment is not None:
            return segment
        refused_at = refused_at or time.monotonic()
        if time.monotonic() - refused_at > _GRACE_SECONDS:
            raise WorkerLostError(
                f"Rank {rank} found nobody at the address that rank 0 left under the key {key!r}: "
                "rank 0 has ended, or runs on another host or in another network namespace. Start "
                "all ranks on one host, and each communicator with a key of its own.",
                [0],
            )
        time.sleep(0.02)


def _await_invitation(store: Store, key: str, deadline: float) -> dict[str, Any] | None:
    """Returns what rank 0 has left under the key, or None if there is no time left."""
    left = deadline - time.monotonic()
    return _read(store.get(key)) if left > 0 and have_come(store, [key], left) else None


def _ask(invitation: dict[str, Any], rank: int, size: int, deadline: float) -> Segment | None:
    """Returns None if nobody is there, or not the one who invited."""
    request = {"token": invitation.get("token"), "rank": rank, "size": size}
    kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_UNIX, kind) as connection:
        # A host that is paused answers when it goes on.
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection.connect(f"\0{invitation.get('address')}")
            if _user_of(connection) != os.getuid():
                return None
            connection.send(json.dumps(request).encode())
            message, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 1)
        except OSError:
            return None
    answer = _read(message)
    if "refusal" in answer:
        raise JobMismatchError(str(answer["refusal"]), [rank])
    return Segment(fds[0], int(answer["arena_bytes"])) if fds else None


def _read(message: bytes) -> dict[str, Any]:
    try:
        value = json.loads(message)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def _words(ranks: set[int]) -> str:
    numbers = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
