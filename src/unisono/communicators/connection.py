"""A TCP connection to one rank, encrypted or not, for messages in both directions.

Messages arrive in the order in which they were given. Each is preceded by its length, so that
the receiver finds one that does not fit.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections import deque

from torch import Tensor

from unisono.communicators.sockets import NOT_NOW
from unisono.communicators.transport import BrokenConnectionError

_LENGTH = struct.Struct("!Q")
# What is moved in one direction before the other has its turn.
_TURN_BYTES = 1 << 20
# Of a long message as much should have come before this rank wakes up.
_WORTH_WAKING_BYTES = 256 << 10
# Up to here a message and its length are sent as one.
_SMALL_BYTES = 32 << 10
# Linger for 0 seconds.
_RESET = struct.pack("ii", 1, 0)


class Message:
    """Bytes on their way, in or out.

    Attributes:
        data: What is sent, or the room for what is received.
        is_done: Whether all of it was moved.
    """

    __slots__ = ("data", "is_done")

    def __init__(self, tensor: Tensor) -> None:
        self.data = memoryview(tensor.numpy())  # type: ignore[arg-type]
        self.is_done = False


class Connection:
    """A connection to one peer, and what is under way on it.

    Args:
        connected: A socket, encrypted or not.
        peer: The rank at the other end.
    """

    def __init__(self, connected: socket.socket, peer: int) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(0)
        self._socket = connected
        self._is_encrypted = isinstance(connected, ssl.SSLSocket)
        self._awaited = 1
        self._peer = peer
        self._outgoing: deque[tuple[memoryview, Message]] = deque()
        self._incoming: deque[Message] = deque()
        self._length = bytearray(_LENGTH.size)
        # Where the next bytes go: into the length of a message, or into the message.
        self._target = memoryview(self._length)
        self._is_length = True
        self._broken: BrokenConnectionError | None = None

    def send(self, tensor: Tensor) -> Message:
        """Begins to send bytes."""
        message = Message(tensor)
        length = _LENGTH.pack(len(message.data))
        if len(message.data) <= _SMALL_BYTES:
            self._outgoing.append((memoryview(length + message.data), message))
        else:
            self._outgoing.append((memoryview(length), message))
            self._outgoing.append((message.data, message))
        return message

    def receive(self, room: Tensor) -> Message:
        """Begins to receive a message, which is at most as long as `room`."""
        message = Message(room)
        self._incoming.append(message)
        return message

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._outgoing or self._incoming)

    @property
    def is_awaited(self) -> bool:
        """Whether something is still to come."""
        return bool(self._incoming)

    def watch_with(self, poll: select.poll) -> None:
        """Lets `poll` notice when something can be moved."""
        if self._incoming:
            self._await_much()
        wanted = (select.POLLIN if self._incoming else 0) | (
            select.POLLOUT if self._outgoing else 0
        )
        # A descriptor is no longer valid when another thread has closed it.
        with contextlib.suppress(ValueError):
            poll.register(self._socket, wanted)

    def _await_much(self) -> None:
        """Sees to it that this rank does not wake up for every packet of a long message."""
        wanted = 1 if self._is_encrypted else min(len(self._target), _WORTH_WAKING_BYTES)
        if wanted != self._awaited:
            self._awaited = wanted
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def move(self) -> bool:
        """Moves some bytes out and some in, if that is possible now; returns whether it was."""
        if self._broken is not None:
            raise self._broken
        try:
            is_sent = bool(self._outgoing) and self._send_some()
            return (bool(self._incoming) and self._receive_some()) or is_sent
        except OSError as error:
            raise self._break(str(error)) from error

    def _break(self, why: str) -> BrokenConnectionError:
        self._broken = BrokenConnectionError(why, self._peer)
        return self._broken

    def _send_some(self) -> bool:
        view, message = self._outgoing[0]
        try:
            count = self._socket.send(view[:_TURN_BYTES])
        except NOT_NOW:
            return False
        if count < len(view):
            self._outgoing[0] = view[count:], message
            return True
        self._outgoing.popleft()
        message.is_done = not (self._outgoing and self._outgoing[0][1] is message)
        return True

    def _receive_some(self) -> bool:
        try:
            count = self._socket.recv_into(self._target[:_TURN_BYTES])
        except NOT_NOW:
            return False
        if count == 0:
            raise self._break("it has closed the connection")
        self._target = self._target[count:]
        if not self._target:
            self._go_on()
        return True

    def _go_on(self) -> None:
        """Turns from a length that is complete to its message, or from a message to a length."""
        message = self._incoming[0]
        if self._is_length:
            (length,) = _LENGTH.unpack(self._length)
            if length > len(message.data):
                room = len(message.data)
                raise self._break(f"it sent {length} bytes where {room} were expected")
            self._target = message.data[:length]
        else:
            self._incoming.popleft()
            message.is_done = True
            self._target = memoryview(self._length)
        self._is_length = not self._is_length

    def close(self, *, has_failed: bool = False) -> None:
        """Ends it, and what is under way. After a failure the peer can send no more, either."""
        self._outgoing.clear()
        self._incoming.clear()
        with contextlib.suppress(OSError):
            if has_failed:
                # To be closed at once, with a reset.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # Also where a process that was forked from this one has it still open.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
