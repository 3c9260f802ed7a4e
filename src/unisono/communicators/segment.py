"""Memory without a name that the processes of one host share, and how they come by it.

Rank 0 makes the memory and listens on a socket of the host. The address of the socket and a secret
travel through the store of the job; who connects as the same user and knows the secret is given a
descriptor. Then it says whether it could map the memory, and rank 0 tells all ranks whether all
could. Nothing has a name in a file system, so nothing can stay behind.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from unisono.communicators.greeting import Guest, Reception, Steps
from unisono.communicators.hub import error_of
from unisono.communicators.stores import have_come
from unisono.errors import (
    CommunicationError,
    JobMismatchError,
    WorkerLostError,
    WorkerTimeoutError,
)
from unisono.system import user

# How long a guest that finds nobody at the address looks for a newer one.
_GRACE_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_MAX_MESSAGE = 4096


class _Closable(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closable)


class Host:
    """Rank 0, which hands the memory out."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._missing = set(range(1, size))
        self._size = size
        self._token = secrets.token_hex(32)
        self._there: list[socket.socket] = []
        self._fd = -1
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        address = f"unisono-{secrets.token_hex(16)}"
        listener.bind(f"\0{address}")
        listener.listen(size + 128)
        self._reception = Reception(listener, self._steps)
        store.set(key, json.dumps({"address": address, "token": self._token}))

    def hand_out(self, fd: int, timeout_seconds: float, check_health: Callable[[], None]) -> None:
        """Returns when every other rank has mapped the memory."""
        self._fd = fd
        deadline = time.monotonic() + timeout_seconds
        try:
            while self._missing:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._timed_out(timeout_seconds)
                self._reception.turn(min(left, _LOOK_SECONDS))
                check_health()
        except CommunicationError as error:
            refuse(self._store, self._key, error)
            self._tell(_refusal(error))
            raise
        else:
            self._store.delete_key(self._key)
            self._tell({})
        finally:
            self._reception.close()
            for guest in self._there:
                guest.close()

    def _tell(self, verdict: dict[str, Any]) -> None:
        for guest in self._there:
            with contextlib.suppress(OSError):
                guest.send(json.dumps(verdict).encode())

    def _steps(self, guest: Guest) -> Steps[None]:
        guest.socket.settimeout(0)
        # Another user is not listened to at all.
        if _user_of(guest.socket) != user():
            return
        request = yield from _received(guest.socket)
        token = str(request.get("token", "")).encode()
        if not hmac.compare_digest(token, self._token.encode()):
            return
        guest.is_known = guest.is_kept = True
        self._there.append(guest.socket)
        rank, size = request.get("rank"), request.get("size")
        if size != self._size or rank not in self._missing:
            raise JobMismatchError(
                f"Rank {rank} of {size} joined a job of {self._size} ranks that waits for "
                f"{_words(self._missing)}. Start each rank of a job once, and give all of them the "
                "same number of ranks.",
                [rank] if isinstance(rank, int) else [],
            )
        socket.send_fds(guest.socket, [b"{}"], [self._fd])
        answer = yield from _received(guest.socket)
        if "failure" in answer:
            raise CommunicationError(str(answer["failure"]), [rank])
        self._missing.discard(rank)

    def _timed_out(self, timeout_seconds: float) -> WorkerTimeoutError:
        return WorkerTimeoutError(
            f"Rank 0 waited {timeout_seconds:g} s for {_words(self._missing)} of {self._size} to "
            "join its shared memory. Start them on this host, or raise `timeout_seconds` if they "
            "are slow.",
            sorted(self._missing),
        )


def refuse(store: Store, key: str, error: CommunicationError) -> None:
    """Tells ranks that come later why there is no memory for them."""
    store.set(key, json.dumps(_refusal(error)))


def _refusal(error: CommunicationError) -> dict[str, Any]:
    return {"refusal": [type(error).__name__, str(error), error.ranks]}


def receive_segment(
    store: Store,
    key: str,
    rank: int,
    size: int,
    timeout_seconds: float,
    enter: Callable[[int], _T],
) -> _T:
    """Returns what `enter` makes of the memory that rank 0 hands out, when all ranks have it."""
    deadline = time.monotonic() + timeout_seconds
    refused_at = None
    while True:
        invitation = _await_invitation(store, key, deadline)
        if invitation is None:
            raise WorkerTimeoutError(
                f"Rank {rank} waited {timeout_seconds:g} s for rank 0 to invite it under the key "
                f"{key!r}, and to answer. Start rank 0 with the same key, or raise "
                "`timeout_seconds` if it is slow.",
                [0],
            )
        _raise_refusal(invitation)
        entered = _ask(invitation, rank, size, deadline, enter)
        if entered is not None:
            return entered
        refused_at = refused_at or time.monotonic()
        if time.monotonic() - refused_at > _GRACE_SECONDS:
            raise WorkerLostError(
                f"Rank {rank} could not connect to the address that rank 0 left under the key "
                f"{key!r}: rank 0 has ended, or runs on another host or in another network "
                "namespace. Start all ranks on one host, and give each communicator its own key.",
                [0],
            )
        time.sleep(0.02)


def _await_invitation(store: Store, key: str, deadline: float) -> dict[str, Any] | None:
    """Returns what rank 0 has left under the key, or None if there is no time left."""
    left = deadline - time.monotonic()
    return _read(store.get(key)) if left > 0 and have_come(store, [key], left) else None


def _ask(
    invitation: dict[str, Any], rank: int, size: int, deadline: float, enter: Callable[[int], _T]
) -> _T | None:
    """Returns None if nobody is there, or not the one who invited."""
    request = {"token": invitation.get("token"), "rank": rank, "size": size}
    kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_UNIX, kind) as connection:
        # A host that is paused answers when it goes on.
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection.connect(f"\0{invitation.get('address')}")
            if _user_of(connection) != user():
                return None
            connection.send(json.dumps(request).encode())
            message, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 1)
            _raise_refusal(_read(message))
            if not fds:
                return None
        except OSError:
            return None
        return _entered(connection, fds[0], rank, deadline, enter)


def _entered(
    connection: socket.socket, fd: int, rank: int, deadline: float, enter: Callable[[int], _T]
) -> _T:
    """Maps the memory, tells rank 0 whether that went well, and hears whether it did everywhere."""
    try:
        entered = enter(fd)
    except OSError as error:
        failure = no_memory(rank, error)
        with contextlib.suppress(OSError):
            connection.send(json.dumps({"failure": str(failure)}).encode())
        raise failure from error
    try:
        # Rank 0 may have said no and hung up already. If it has ended, the memory shows that, too.
        with contextlib.suppress(OSError):
            connection.send(b"{}")
        with contextlib.suppress(OSError):
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            _raise_refusal(_read(_last_word(connection)))
    except BaseException:
        entered.close()
        raise
    return entered


def _last_word(connection: socket.socket) -> bytes:
    """Returns what rank 0 has said before it hung up.

    If it hung up before it read all that it was sent, Linux tells that first, once, and only then
    what it had said.
    """
    try:
        return connection.recv(_MAX_MESSAGE)
    except ConnectionResetError:
        return connection.recv(_MAX_MESSAGE)


def no_memory(rank: int, error: OSError) -> CommunicationError:
    """The error for a rank that cannot make or map shared memory."""
    return CommunicationError(
        f"Rank {rank} cannot share memory with the other ranks of its host: {error}. Raise the "
        "limits of its process (`ulimit -v`, `-n`, `-f`), or ask for `implementation=RING`.",
        [rank],
    )


def _raise_refusal(answer: dict[str, Any]) -> None:
    if "refusal" in answer:
        raise error_of(*answer["refusal"])


def _received(connection: socket.socket) -> Steps[dict[str, Any]]:
    while True:
        try:
            message = connection.recv(_MAX_MESSAGE)
        except BlockingIOError:
            yield select.POLLIN
            continue
        if not message:
            raise ConnectionError("it hung up")
        return _read(message)


def _read(message: bytes) -> dict[str, Any]:
    try:
        value = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _user_of(connection: socket.socket) -> str:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, number, _ = struct.unpack("3i", credentials)
    return str(number)


def _words(ranks: set[int]) -> str:
    numbers = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
