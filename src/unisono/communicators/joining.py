"""How ranks come to be connected, each to each, over TCP.

Every rank listens, and says through the store where, with a secret of its own. It calls the ranks
before it, tells them their secret and who it is, and waits for those after it to call. Nobody
listens any more once all are connected.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.addresses import own_address
from unisono.communicators.headers import ranks_in_words
from unisono.communicators.mesh import Connection, Mesh
from unisono.communicators.sockets import keep_alive
from unisono.communicators.stores import say_to_all
from unisono.communicators.tls import Encryption, encryption
from unisono.errors import JobMismatchError, UnsupportedError, WorkerLostError, WorkerTimeoutError

# How long somebody who has called may take to say who it is.
_GREETING_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_GREETING = struct.Struct("!32sI")
_WELCOME = b"!"


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
    host: str | None,
    timeout_seconds: float,
    joining_seconds: float | None = None,
) -> Mesh:
    """Connects this rank to all others, which do the same.

    Args:
        store: Where the ranks meet. One store, or one prefix of it, serves one call.
        rank: Which rank this is.
        size: How many there are.
        host: The address that other ranks reach this one by; found out if not given.
        timeout_seconds: How long another host may be silent before a connection to it ends.
        joining_seconds: How long to wait for the others here; `timeout_seconds` if not given.
    """
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
        with _listening(address) as listener, ExitStack() as made:
            own = _Invitation(address, listener.getsockname()[1], secrets.token_hex(16), bool(keys))
            invitations = self._invitations(own, deadline)
            for peer in called:
                call = _Call(self.rank, peer, invitations[peer], keys, self.seconds)
                sockets[peer] = call.connected(deadline)
                made.callback(sockets[peer].close)
            reception = _Reception(self.rank, listener, own.secret, keys)
            missing = set(callers)
            while missing:
                if time.monotonic() > deadline:
                    raise reception.late(missing, self.size, self.seconds)
                if (guest := reception.next_guest(missing, deadline)) is not None:
                    peer, sockets[peer] = guest
                    made.callback(sockets[peer].close)
                    missing.discard(peer)
            made.pop_all()
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


@contextmanager
def _listening(address: str) -> Iterator[socket.socket]:
    try:
        family, where = _resolved(address)
        listener = socket.create_server(where, family=family, backlog=1024)
    except OSError as error:
        raise UnsupportedError(
            f"{address!r} is not an address of this host that others can connect to ({error}). "
            "Give one in the cluster, or name the network in GLOO_SOCKET_IFNAME."
        ) from error
    with listener:
        yield listener


def _resolved(address: str) -> tuple[int, tuple[str, int]]:
    family, *_, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    found = str(where[0])
    # Many hosts know their own name as that of the loopback, where others would not find them.
    is_known_so = address not in (found, "localhost") and ipaddress.ip_address(found).is_loopback
    return family, ("" if is_known_so else found, 0)


class _Call(NamedTuple):
    """A call to a rank that listens."""

    rank: int
    peer: int
    invitation: _Invitation
    keys: Encryption | None
    timeout_seconds: float

    def connected(self, deadline: float) -> socket.socket:
        """Returns a connection on which this rank is known."""
        address, port, *_ = self.invitation
        try:
            while (connected := self._greeted(deadline)) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(_PAUSE_SECONDS)
            return connected
        except TimeoutError as error:
            raise WorkerTimeoutError(
                f"Rank {self.rank} waited {self.timeout_seconds:g} s for rank {self.peer} to "
                f"answer at {address}:{port}. Look at its log, and at the network and firewall "
                "between.",
                [self.peer],
            ) from error
        except OSError as error:
            raise WorkerLostError(
                f"Rank {self.rank} could not connect to rank {self.peer} at {address}:{port}: "
                f"{error}. Look at its log, and at the network and firewall between.",
                [self.peer],
            ) from error

    def _greeted(self, deadline: float) -> socket.socket | None:
        """Returns a connection, or None if the peer hung up: this rank was slow to greet."""
        address, port, secret, _ = self.invitation
        left = max(0.1, deadline - time.monotonic())
        connected = socket.create_connection((address, port), timeout=left)
        with ExitStack() as made:
            made.callback(connected.close)
            if self.keys is not None:
                connected = self.keys.calling.wrap_socket(connected)
                made.callback(connected.close)
            connected.sendall(_GREETING.pack(secret.encode(), self.rank))
            if connected.recv(1) != _WELCOME:
                return None
            made.pop_all()
        return connected


class _Reception:
    """Where other ranks call, and perhaps strangers."""

    def __init__(
        self, rank: int, listener: socket.socket, secret: str, keys: Encryption | None
    ) -> None:
        self._rank = rank
        self._listener = listener
        self._secret = secret.encode()
        self._keys = keys
        self._refused = ""

    def next_guest(self, missing: set[int], deadline: float) -> tuple[int, socket.socket] | None:
        """Returns the next rank that calls; None if a stranger does, or nobody."""
        self._listener.settimeout(max(0.0, min(0.5, deadline - time.monotonic())) or 0.001)
        try:
            guest, _ = self._listener.accept()
        except TimeoutError:
            return None
        with ExitStack() as made:
            made.callback(guest.close)
            guest.settimeout(_GREETING_SECONDS)
            try:
                if self._keys is not None:
                    guest = self._keys.called.wrap_socket(guest, server_side=True)
                    made.callback(guest.close)
                secret, peer = _GREETING.unpack(_exactly(guest, _GREETING.size))
                if not hmac.compare_digest(secret, self._secret) or peer not in missing:
                    return None
                guest.sendall(_WELCOME)
            except OSError as error:
                self._refused = f" Somebody called and was refused: {error}."
                return None
            made.pop_all()
        return peer, guest

    def late(self, missing: set[int], size: int, seconds: float) -> WorkerTimeoutError:
        """The error for ranks that have not called in time."""
        return WorkerTimeoutError(
            f"Rank {self._rank} waited {seconds:g} s for {ranks_in_words(sorted(missing))} of "
            f"{size} to connect. All ranks had announced themselves before.{self._refused} Look at "
            "the logs of the missing ranks, and at the network and firewall between.",
            sorted(missing),
        )


def _exactly(connected: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        if not (more := connected.recv(num_bytes - len(received))):
            raise ConnectionError("it hung up")
        received += more
    return received
