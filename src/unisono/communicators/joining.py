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

from unisono.communicators.addresses import own_address
from unisono.communicators.connection import Connection
from unisono.communicators.greeting import (
    JOB_TOKEN,
    Guest,
    Reception,
    RefusedError,
    Steps,
    call,
    job_key,
    welcome,
)
from unisono.communicators.headers import ranks_in_words
from unisono.communicators.mesh import Mesh
from unisono.communicators.sockets import keep_alive, listening
from unisono.communicators.stores import say_to_all
from unisono.communicators.tls import Encryption, encryption
from unisono.errors import JobMismatchError, UnsupportedError, WorkerLostError, WorkerTimeoutError


class _Invitation(NamedTuple):
    """Where a rank listens, what callers must know, and whether it encrypts."""

    address: str
    port: int
    secret: str
    is_encrypted: bool


def join_mesh(
    store: Store,
    rank: int,
    size: int,
    *,
    host: str | None = None,
    timeout_seconds: float,
    joining_seconds: float | None = None,
) -> Mesh:
    """Connects this rank to all others, which do the same."""
    patience = timeout_seconds if joining_seconds is None else joining_seconds
    party = _Party(store, rank, size, host, patience)
    sockets = party.connected(called=range(rank), callers=range(rank + 1, size))
    for one in sockets.values():
        keep_alive(one, timeout_seconds)
    return Mesh(rank, {peer: Connection(one, peer) for peer, one in sockets.items()})


def join_star(
    store: Store,
    rank: int,
    size: int,
    *,
    host: str | None,
    timeout_seconds: float,
    joining_seconds: float,
) -> dict[int, socket.socket]:
    """Connects every rank to rank 0, for small messages, and returns the connections by rank."""
    party = _Party(store, rank, size, host, joining_seconds)
    others = range(1, size)
    sockets = party.connected(called=[0] if rank else [], callers=[] if rank else others)
    for one in sockets.values():
        keep_alive(one, timeout_seconds, is_idle=True)
    return sockets


class _Party(NamedTuple):
    """Ranks that connect to each other."""

    store: Store
    rank: int
    size: int
    host: str | None
    seconds: float

    def connected(self, called: Sequence[int], callers: Sequence[int]) -> dict[int, socket.socket]:
        """Returns connections to the ranks that this one calls, and those that call it."""
        deadline = time.monotonic() + self.seconds
        keys = encryption()
        address = own_address(
            self.store, self.rank, self.size, host=self.host, timeout_seconds=self.seconds
        )
        sockets: dict[int, socket.socket] = {}
        with _listening(address) as listener:
            own = _Invitation(address, listener.getsockname()[1], secrets.token_hex(16), bool(keys))
            invitations = self._invitations(own, deadline)
            try:
                for peer in called:
                    invitation = invitations[peer]
                    sockets[peer] = _called(
                        self.rank, peer, invitation, keys, self.seconds, deadline
                    )
                coming = _Callers(self.rank, set(callers), sockets, own, keys)
                coming.await_all(listener, self.size, self.seconds, deadline)
            except BaseException:
                for one in sockets.values():
                    one.close()
                raise
        return sockets

    def _invitations(self, own: _Invitation, deadline: float) -> list[_Invitation]:
        said = say_to_all(
            PrefixStore("mesh", self.store),
            self.rank,
            self.size,
            json.dumps(own),
            timeout_seconds=max(0.0, deadline - time.monotonic()),
        )
        invitations = [_Invitation(*json.loads(text)) for text in said]
        _check_encryption(self.rank, invitations)
        return invitations


def _check_encryption(rank: int, invitations: list[_Invitation]) -> None:
    own = invitations[rank].is_encrypted
    if odd := [peer for peer, one in enumerate(invitations) if one.is_encrypted != own]:
        here, there = ("TCP_TLS", "another") if own else ("not TCP_TLS", "TCP_TLS")
        raise JobMismatchError(
            f"GLOO_DEVICE_TRANSPORT is {here} on rank {rank} and {there} on "
            f"{ranks_in_words(odd)}. Encrypt on all ranks or on none.",
            odd,
        )


def _listening(address: str) -> socket.socket:
    try:
        return listening(address, 0)
    except OSError as error:
        raise UnsupportedError(
            f"{address!r} is not an address of this host that others can connect to ({error}). "
            "Give one in the cluster, or name the network in GLOO_SOCKET_IFNAME."
        ) from error


def _called(
    rank: int,
    peer: int,
    invitation: _Invitation,
    keys: Encryption | None,
    seconds: float,
    deadline: float,
) -> socket.socket:
    """Calls a rank that listens, and returns a connection on which both are known."""
    address, port, secret, _ = invitation
    try:
        return call((address, port), job_key(secret), rank, keys, deadline).socket
    except TimeoutError as error:
        raise WorkerTimeoutError(
            f"Rank {rank} waited {seconds:g} s for rank {peer} to answer at {address}:{port}. "
            "Check its log, the network and the firewall.",
            [peer],
        ) from error
    except RefusedError as error:
        raise JobMismatchError(
            f"Rank {rank} was refused by rank {peer}, which has another {JOB_TOKEN}. Give all "
            "workers the same one.",
            [peer],
        ) from error
    except OSError as error:
        raise WorkerLostError(
            f"Rank {rank} could not connect to rank {peer} at {address}:{port}: {error}. Check its "
            "log, the network and the firewall.",
            [peer],
        ) from error


class _Callers:
    """Ranks that call this one, and strangers who do."""

    def __init__(
        self,
        rank: int,
        missing: set[int],
        sockets: dict[int, socket.socket],
        own: _Invitation,
        keys: Encryption | None,
    ) -> None:
        self._rank = rank
        self._missing = missing
        self._sockets = sockets
        self._key = job_key(own.secret)
        self._keys = keys
        self._refused = ""

    def await_all(
        self, listener: socket.socket, size: int, seconds: float, deadline: float
    ) -> None:
        """Returns when all have called."""
        reception = Reception(listener, self._steps)
        try:
            while self._missing:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._late(size, seconds)
                reception.turn(left)
        finally:
            reception.close()

    def _steps(self, guest: Guest) -> Steps[None]:
        try:
            greeted = yield from welcome(guest, self._key, self._keys)
        except OSError as error:
            self._refused = f" Somebody called and was refused: {error}."
            return
        guest.is_known = True
        if greeted.rank in self._missing:
            guest.is_kept = True
            self._missing.discard(greeted.rank)
            self._sockets[greeted.rank] = greeted.socket

    def _late(self, size: int, seconds: float) -> WorkerTimeoutError:
        late = sorted(self._missing)
        return WorkerTimeoutError(
            f"Rank {self._rank} waited {seconds:g} s for {ranks_in_words(late)} of {size} to "
            f"connect. All ranks had announced themselves before.{self._refused} Check the logs of "
            "the missing ranks, the network and the firewall.",
            late,
        )
