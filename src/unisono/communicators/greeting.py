"""How two processes of a job make sure of each other before either believes anything.

Both prove that they know the same key, and neither shows it:

    called -> caller    which protocol this is, and a random number
    caller -> called    a random number, its rank, and an HMAC of all that
    called -> caller    another HMAC of all that, or zeros: refused

A stranger who calls learns nothing. The key follows from UNISONO_JOB_TOKEN, so without a token it
only keeps apart jobs that met by accident.

Nothing here blocks: what waits is a generator that yields the events of `select` it waits for. So
one thread can judge many callers at a time, and every wait ends at its deadline and at Ctrl-C.
"""

from __future__ import annotations

import hmac
import os
import select
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from unisono.communicators.sockets import NOT_NOW, close_in_children

if TYPE_CHECKING:
    from unisono.communicators.sockets import Encryption

JOB_TOKEN = "UNISONO_JOB_TOKEN"
# How long a caller may take to say who it is, and how many may be about to.
_GREETING_SECONDS = 5.0
_MAX_UNKNOWN = 128
_PAUSE_SECONDS = 0.1

_T = TypeVar("_T")
Steps: TypeAlias = Generator[int, None, _T]

_PROTOCOL = b"unisono 1\n"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HELLO_BYTES = len(_PROTOCOL) + _NONCE_BYTES
_GREETING = struct.Struct(f"!{_NONCE_BYTES}sI{_PROOF_BYTES}s")
_REFUSAL = bytes(_PROOF_BYTES)


class RefusedError(ConnectionError):
    """The other end has another key, and `rank` is the rank that the caller claims."""

    def __init__(self, rank: int) -> None:
        super().__init__("it belongs to another job, or has another token")
        self.rank = rank


class StrangeError(ConnectionError):
    """The other end is no process of any job."""


class Greeted(NamedTuple):
    """A connection to a process of the job."""

    socket: socket.socket
    rank: int
    key: bytes


def has_token() -> bool:
    """Whether this job has a secret."""
    return bool(os.environ.get(JOB_TOKEN))


def job_key(purpose: str) -> bytes:
    """Returns a key that follows from the token of the job and from `purpose`."""
    token = os.fsencode(os.environ.get(JOB_TOKEN, ""))
    return hmac.digest(token, os.fsencode(purpose), "sha256")


def send(connected: socket.socket, data: bytes) -> Steps[None]:
    """Sends all bytes."""
    view = memoryview(data)
    while view:
        try:
            view = view[connected.send(view) :]
        except NOT_NOW as reason:
            yield _wanted(reason, select.POLLOUT)


def receive(connected: socket.socket, num_bytes: int) -> Steps[bytes]:
    """Returns exactly so many bytes."""
    received = bytearray()
    while len(received) < num_bytes:
        try:
            more = connected.recv(num_bytes - len(received))
        except NOT_NOW as reason:
            yield _wanted(reason, select.POLLIN)
            continue
        if not more:
            raise ConnectionError("it hung up")
        received += more
    return bytes(received)


def _wanted(reason: OSError, otherwise: int) -> int:
    if isinstance(reason, ssl.SSLWantReadError):
        return select.POLLIN
    return select.POLLOUT if isinstance(reason, ssl.SSLWantWriteError) else otherwise


def greet(
    connected: socket.socket, key: bytes, rank: int, keys: Encryption | None
) -> Steps[Greeted]:
    """Greets a process that was called, and makes sure that it is of the job.

    Raises:
        RefusedError: If it says that this process has another key.
        StrangeError: If it is something else.
        OSError: If it hangs up, as one does that has too many callers.
    """
    connected = yield from _encrypted(connected, keys and keys.calling, is_called=False)
    hello = yield from receive(connected, _HELLO_BYTES)
    if not hello.startswith(_PROTOCOL):
        raise StrangeError(f"it answered {hello[:16]!r}")
    nonce = os.urandom(_NONCE_BYTES)
    proofs = _Proofs(key, rank, hello, nonce)
    yield from send(connected, _GREETING.pack(nonce, rank, proofs.of("caller")))
    answer = yield from receive(connected, _PROOF_BYTES)
    if answer == _REFUSAL:
        raise RefusedError(rank)
    if not hmac.compare_digest(answer, proofs.of("called")):
        raise StrangeError("it does not know the token of the job")
    return Greeted(connected, rank, proofs.of("session"))


def welcome(guest: Guest, key: bytes, keys: Encryption | None) -> Steps[Greeted]:
    """Makes sure that a caller is of the job."""
    guest.socket = yield from _encrypted(guest.socket, keys and keys.called, is_called=True)
    hello = _PROTOCOL + os.urandom(_NONCE_BYTES)
    yield from send(guest.socket, hello)
    greeting = yield from receive(guest.socket, _GREETING.size)
    nonce, rank, proof = _GREETING.unpack(greeting)
    proofs = _Proofs(key, rank, hello, nonce)
    if not hmac.compare_digest(proof, proofs.of("caller")):
        yield from send(guest.socket, _REFUSAL)
        raise RefusedError(rank)
    yield from send(guest.socket, proofs.of("called"))
    return Greeted(guest.socket, rank, proofs.of("session"))


class _Proofs(NamedTuple):
    key: bytes
    rank: int
    hello: bytes
    nonce: bytes

    def of(self, whom: str) -> bytes:
        said = struct.pack("!I", self.rank) + self.hello + self.nonce
        return hmac.digest(self.key, whom.encode() + said, "sha256")


def _encrypted(
    connected: socket.socket, context: ssl.SSLContext | None, *, is_called: bool
) -> Steps[socket.socket]:
    connected.settimeout(0)
    if context is None:
        return connected
    encrypted = context.wrap_socket(connected, server_side=is_called, do_handshake_on_connect=False)
    try:
        while True:
            try:
                encrypted.do_handshake()
                return encrypted
            except NOT_NOW as reason:
                yield _wanted(reason, select.POLLIN)
    except BaseException:
        encrypted.close()
        raise


def finish(steps: Steps[_T], connected: socket.socket, deadline: float) -> _T:
    """Does all steps on a connection, and raises `TimeoutError` at the deadline."""
    poll, number = select.poll(), connected.fileno()
    while True:
        try:
            poll.register(number, next(steps))
        except StopIteration as end:
            result: _T = end.value
            return result
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000 + 1):
            steps.close()
            raise TimeoutError("it does not answer")


def call(
    address: tuple[str, int], key: bytes, rank: int, keys: Encryption | None, deadline: float
) -> Greeted:
    """Calls a process of the job until it answers; see `greet` for the errors."""
    while True:
        left = max(_PAUSE_SECONDS, deadline - time.monotonic())
        connected = socket.create_connection(address, timeout=left)
        try:
            greeted = finish(greet(connected, key, rank, keys), connected, deadline)
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            connected.close()
            if isinstance(error, (RefusedError, StrangeError)) or time.monotonic() > deadline:
                raise
            # It had too many callers at a time, or this one was too slow.
            time.sleep(_PAUSE_SECONDS)
        except BaseException:
            connected.close()
            raise
        else:
            close_in_children(greeted.socket)
            return greeted


class Guest:
    """Somebody who has called."""

    steps: Steps[None]

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.number = connected.fileno()
        self.is_known = self.is_kept = False
        self.events = 0
        self.deadline = time.monotonic() + _GREETING_SECONDS


class Reception:
    """Where processes of the job call, and strangers, who are judged at the same time.

    Strangers who say nothing are hung up on after some seconds, or when too many have come since.
    """

    def __init__(self, listener: socket.socket, steps: Callable[[Guest], Steps[None]]) -> None:
        listener.settimeout(0)
        self._listener = listener
        self._steps = steps
        self._guests: dict[int, Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def wake_with(self, bell: socket.socket) -> None:
        """Ends a turn when there is something to read on `bell`."""
        self._selector.register(bell, selectors.EVENT_READ)

    def turn(self, seconds: float | None) -> None:
        """Waits until something comes, at most so long, and deals with it."""
        if self._unknown():
            seconds = _PAUSE_SECONDS if seconds is None else min(seconds, _PAUSE_SECONDS)
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd in self._guests:
                self._serve(self._guests[key.fd])
        now = time.monotonic()
        for guest in self._unknown():
            if guest.deadline < now:
                self._dismiss(guest)

    def _unknown(self) -> list[Guest]:
        """Returns those who have not said who they are, the first to come first."""
        return [one for one in self._guests.values() if not one.is_known]

    def _accept(self) -> None:
        for _ in range(_MAX_UNKNOWN):
            unknown = self._unknown()
            try:
                connected, _ = self._listener.accept()
            except (*NOT_NOW, ConnectionError):
                return
            except OSError:
                # No descriptor is left.
                if not unknown:
                    time.sleep(_PAUSE_SECONDS)
                    return
                self._dismiss(unknown[0])
                continue
            if len(unknown) == _MAX_UNKNOWN:
                self._dismiss(unknown[0])
            guest = Guest(connected)
            guest.steps = self._steps(guest)
            self._guests[guest.number] = guest
            self._serve(guest)

    def _serve(self, guest: Guest) -> None:
        try:
            wanted = next(guest.steps)
        except (StopIteration, OSError):
            self._dismiss(guest)
            return
        events = selectors.EVENT_READ if wanted == select.POLLIN else selectors.EVENT_WRITE
        if guest.events == 0:
            self._selector.register(guest.number, events)
        elif events != guest.events:
            self._selector.modify(guest.number, events)
        guest.events = events

    def _dismiss(self, guest: Guest) -> None:
        self._guests.pop(guest.number, None)
        if guest.events:
            self._selector.unregister(guest.number)
        guest.steps.close()
        if not guest.is_kept:
            guest.socket.close()

    def close(self) -> None:
        """Hangs up on everybody who was not kept, and listens no more."""
        for guest in list(self._guests.values()):
            self._dismiss(guest)
        self._selector.close()
        self._listener.close()
