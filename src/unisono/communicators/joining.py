"""How ranks come to be connected, each to each, over TCP.

Every rank listens, and says through the store where, with its own secret. It calls the ranks
before it, and waits for those after it to call. Both ends of a connection prove that they know the
secret of the one who was called, and the token of the job if there is one. Nobody listens any more
once all are connected.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators import greeting
from unisono.communicators.connection import Connection
from unisono.communicators.headers import ranks_in_words
from unisono.communicators.hosts import own_address
from unisono.communicators.mesh import Mesh
from unisono.communicators.sockets import encryption, keep_alive, listening
from unisono.communicators.stores import Countdown, say_to_all
from unisono.errors import JobMismatchError, UnsupportedError, WorkerLostError, WorkerTimeoutError


class _Invitation(NamedTuple):
    """Where a rank listens, what callers must know, and whether it encrypts."""

    address: str
    port: int
    secret: str
    is_encrypted: bool


def join_mesh(
    store: Store, rank: int, size: int, *, timeout_seconds: float, joining_seconds: float
) -> Mesh:
    """Connects this rank to all others, which do the same."""
    party = _Party(store, rank, size, joining_seconds)
    sockets = party.connected(called=range(rank), callers=range(rank + 1, size))
    for one in sockets.values():
        keep_alive(one, timeout_seconds)
    return Mesh(rank, {peer: Connection(one, peer) for peer, one in sockets.items()})


def join_star(
    store: Store, rank: int, size: int, *, timeout_seconds: float, joining_seconds: float
) -> dict[int, socket.socket]:
    """Connects every rank to rank 0, for small messages, and returns the connections by rank."""
    party = _Party(store, rank, size, joining_seconds)
    others = range(1, size)
    sockets = party.connected(called=[0] if rank else [], callers=[] if rank else others)
    for one in sockets.values():
        keep_alive(one, timeout_seconds, is_idle=True)
    return sockets


class _Party:
    """Ranks that connect to each other, and strangers who call."""

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._seconds = seconds
        self._left = Countdown(seconds)
        self._keys = encryption()
        self._secret = secrets.token_hex(16)
        self._sockets: dict[int, socket.socket] = {}
        self._missing: set[int] = set()
        self._refused = ""

    def connected(self, called: Sequence[int], callers: Sequence[int]) -> dict[int, socket.socket]:
        """Returns connections to the ranks that this one calls, and those that call it."""
        self._missing = set(callers)
        place = self._store, self._rank, self._size
        address = own_address(*place, timeout_seconds=self._seconds)
        try:
            found = listening(address, 0)
        except OSError as error:
            raise UnsupportedError(
                f"{address!r} is not an address of this host that others can connect to ({error}). "
                "Give one in the cluster, or name the network in GLOO_SOCKET_IFNAME."
            ) from error
        with found as listener:
            port, is_encrypted = listener.getsockname()[1], bool(self._keys)
            own = _Invitation(address, port, self._secret, is_encrypted)
            invitations = self._invitations(own)
            try:
                for peer in called:
                    self._sockets[peer] = self._called(peer, invitations[peer])
                self._await_callers(listener)
            except BaseException:
                for one in self._sockets.values():
                    one.close()
                raise
        return self._sockets

    def _invitations(self, own: _Invitation) -> list[_Invitation]:
        said = say_to_all(
            PrefixStore("mesh", self._store),
            self._rank,
            self._size,
            json.dumps(own),
            timeout_seconds=self._left.seconds(),
        )
        invitations = [_Invitation(*json.loads(text)) for text in said]
        if odd := [r for r, one in enumerate(invitations) if one.is_encrypted != own.is_encrypted]:
            is_own = own.is_encrypted
            here, there = ("TCP_TLS", "another") if is_own else ("not TCP_TLS", "TCP_TLS")
            raise JobMismatchError(
                f"GLOO_DEVICE_TRANSPORT is {here} on rank {self._rank} and {there} on "
                f"{ranks_in_words(odd)}. Encrypt on all ranks or on none.",
                odd,
            )
        return invitations

    def _called(self, peer: int, invitation: _Invitation) -> socket.socket:
        """Calls a rank that listens, and returns a connection on which both are known."""
        address, port, secret, _ = invitation
        rank = self._rank
        try:
            key = greeting.job_key(secret)
            deadline = time.monotonic() + self._left.seconds()
            return greeting.call((address, port), key, rank, self._keys, deadline).socket
        except TimeoutError as error:
            raise WorkerTimeoutError(
                f"Rank {rank} waited {self._seconds:g} s for rank {peer} to answer at "
                f"{address}:{port}. Check its log, the network and the firewall.",
                [peer],
            ) from error
        except greeting.RefusedError as error:
            raise JobMismatchError(
                f"Rank {rank} was refused by rank {peer}, which has another "
                f"{greeting.JOB_TOKEN}. Give all workers the same one.",
                [peer],
            ) from error
        except OSError as error:
            raise WorkerLostError(
                f"Rank {rank} could not connect to rank {peer} at {address}:{port}: {error}. Check "
                "its log, the network and the firewall.",
                [peer],
            ) from error

    def _await_callers(self, listener: socket.socket) -> None:
        reception = greeting.Reception(listener, self._steps)
        try:
            while self._missing:
                if self._left.is_over():
                    late = sorted(self._missing)
                    raise WorkerTimeoutError(
                        f"Rank {self._rank} waited {self._seconds:g} s for {ranks_in_words(late)} "
                        f"of {self._size} to connect. All ranks had announced themselves before."
                        f"{self._refused} Check the logs of the missing ranks, the network and the "
                        "firewall.",
                        late,
                    )
                reception.turn(self._left.seconds())
        finally:
            reception.close()

    def _steps(self, guest: greeting.Guest) -> greeting.Steps[None]:
        try:
            greeted = yield from greeting.welcome(guest, greeting.job_key(self._secret), self._keys)
        except OSError as error:
            self._refused = f" Somebody called and was refused: {error}."
            return
        guest.is_known = True
        if greeted.rank in self._missing:
            guest.is_kept = True
            self._missing.discard(greeted.rank)
            self._sockets[greeted.rank] = greeted.socket
