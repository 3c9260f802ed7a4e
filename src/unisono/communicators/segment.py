"""Memory without a name that the processes of one host share, and how they come by it.

Rank 0 makes the memory and listens on a socket of the host. The address of the socket and a secret
travel through the store of the job. Who connects as the same user and knows the secret is given a
descriptor. Then every rank says through the store whether it could map the memory. Nothing has a
name in a file system, so nothing can stay behind.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.greeting import Guest, Reception, Steps, receive
from unisono.communicators.stores import Countdown, have_come, say_to_all
from unisono.errors import CommunicationError, WorkerLostError, WorkerTimeoutError
from unisono.system import user

_LOOK_SECONDS = 0.5
_SECRET_BYTES = 32


def share_memory(
    store: Store,
    rank: int,
    size: int,
    seconds: float,
    create: Callable[[], int],
    enter: Callable[[int], Any],
) -> Any:
    """Returns what `enter` makes of the memory that rank 0 creates, when all ranks have entered.

    Raises:
        CommunicationError: on all ranks, if one of them cannot enter or does not come in time.
    """
    left = Countdown(seconds)
    # Ranks that counted differently would map more memory than there is.
    key = f"memory of {size} ranks"
    door: _Door | None = None
    entered: Any = None
    failure = ""
    try:
        if rank == 0:
            fd = create()
            entered = enter(fd)
            door = _Door(fd, size - 1)
            store.set(key, f"{door.address} {door.secret}")
        elif not have_come(store, [key], left.seconds()):
            raise _no_answer(rank)
        elif invitation := store.get(key).decode():
            entered = enter(_descriptor(invitation, rank, left))
    except OSError as error:
        failure = (
            f"Rank {rank} cannot share memory with the other ranks of its host: {error}. Raise the "
            "limits of its process (`ulimit -v`, `-n`, `-f`), or ask for `implementation=RING`."
        )
        if rank == 0:
            store.set(key, "")

    def meanwhile() -> bool:
        if door is not None:
            door.open(_LOOK_SECONDS)
        if entered is not None:
            entered.check_health()
        return False

    try:
        told = say_to_all(
            PrefixStore("has memory", store),
            rank,
            size,
            failure,
            timeout_seconds=left.seconds(),
            meanwhile=meanwhile,
        )
        if failed := [other for other, why in enumerate(told) if why]:
            raise CommunicationError(told[failed[0]], failed[:1])
    except BaseException as error:
        if entered is not None:
            if isinstance(error, CommunicationError):
                # Those who have entered raise the same.
                kind = "timeout" if isinstance(error, WorkerTimeoutError) else "lost"
                with contextlib.suppress(CommunicationError):
                    entered.fail(kind, str(error), error.ranks)
            entered.close()
        raise
    finally:
        if door is not None:
            door.reception.close()
    return entered


class _Door:
    """Where rank 0 hands the memory out to so many ranks."""

    def __init__(self, fd: int, num_guests: int) -> None:
        self.address = f"unisono-{secrets.token_hex(16)}"
        self.secret = secrets.token_hex(_SECRET_BYTES // 2)
        self._fd = fd
        self._num_guests = num_guests
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{self.address}")
        listener.listen(num_guests + 128)
        self.reception = Reception(listener, self._steps)

    def open(self, seconds: float) -> None:
        """Hands the memory out until all guests have it, at most so long."""
        left = Countdown(seconds)
        while self._num_guests and not left.is_over():
            self.reception.turn(left.seconds())

    def _steps(self, guest: Guest) -> Steps[None]:
        guest.socket.settimeout(0)
        # Another user is not listened to at all.
        if _user_of(guest.socket) == user():
            said = yield from receive(guest.socket, _SECRET_BYTES)
            if hmac.compare_digest(said, self.secret.encode()):
                socket.send_fds(guest.socket, [b"!"], [self._fd])
                self._num_guests -= 1


def _descriptor(invitation: str, rank: int, left: Countdown) -> int:
    """Returns a descriptor of the memory that rank 0 hands out."""
    address, secret = invitation.split()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        # A rank 0 that is paused answers when it goes on.
        connection.settimeout(left.seconds())
        try:
            connection.connect(f"\0{address}")
            if _user_of(connection) == user():
                connection.send(secret.encode())
                _, fds, _, _ = socket.recv_fds(connection, 1, 1)
                if fds:
                    os.set_inheritable(fds[0], False)  # noqa: FBT003
                    return int(fds[0])
        except TimeoutError:
            raise _no_answer(rank) from None
        except ConnectionError:
            pass
    raise WorkerLostError(
        f"Rank {rank} could not connect to the address that rank 0 left for it: rank 0 has ended, "
        "or runs on another host or in another network namespace. Start all ranks on one host.",
        [0],
    )


def _no_answer(rank: int) -> WorkerTimeoutError:
    return WorkerTimeoutError(
        f"Rank {rank} waited in vain for rank 0 to share its memory. Check the log of rank 0, or "
        "raise `timeout_seconds` if it is slow.",
        [0],
    )


def _user_of(connection: socket.socket) -> str:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, number, _ = struct.unpack("3i", credentials)
    return str(number)
