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
from collections.abc import Iterator
from typing import Any

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
_LINGER_FOR_0_SECONDS = struct.pack("ii", 1, 0)


class Message:
    """What is sent, or the room for what is received, and whether all of it was moved."""

    __slots__ = ("data", "is_done")

    def __init__(self, tensor: Tensor) -> None:
        self.data = memoryview(tensor.numpy())  # type: ignore[arg-type]
        self.is_done = False


class Connection:
    """A connection to one peer, and what is under way on it."""

    def __init__(self, connected: socket.socket, peer: int) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(0)
        self._socket = connected
        self._is_encrypted = isinstance(connected, ssl.SSLSocket)
        self._awaited = 1
        self._peer = peer
        self.outgoing: deque[tuple[memoryview, Message]] = deque()
        self.incoming: deque[Message] = deque()
        self._targets = self._follow_messages()
        self._target = next(self._targets)

    def send(self, tensor: Tensor) -> Message:
        """Begins to send bytes."""
        message = Message(tensor)
        data, length = message.data, _LENGTH.pack(len(message.data))
        views: list[Any] = [length + data] if len(data) <= _SMALL_BYTES else [length, data]
        self.outgoing.extend([(memoryview(view), message) for view in views])
        return message

    def receive(self, room: Tensor) -> Message:
        """Begins to receive a message, which is at most as long as `room`."""
        message = Message(room)
        self.incoming.append(message)
        return message

    def watch_with(self, poll: select.poll) -> None:
        """Lets `poll` notice when something can be moved."""
        wanted = select.POLLOUT if self.outgoing else 0
        if self.incoming:
            wanted |= select.POLLIN
            # This rank need not wake up for every packet of a long message.
            awaited = 1 if self._is_encrypted else min(len(self._target), _WORTH_WAKING_BYTES)
            if awaited != self._awaited:
                self._awaited = awaited
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, awaited)
        # A descriptor is no longer valid when another thread has closed it.
        with contextlib.suppress(ValueError):
            poll.register(self._socket, wanted)

    def move(self) -> bool:
        """Moves some bytes out and some in, if that is possible now; returns whether it was."""
        try:
            is_sent = bool(self.outgoing) and self._send_some()
            return (bool(self.incoming) and self._receive_some()) or is_sent
        except OSError as error:
            raise BrokenConnectionError(str(error), self._peer) from error

    def _send_some(self) -> bool:
        view, message = self.outgoing[0]
        try:
            count = self._socket.send(view[:_TURN_BYTES])
        except NOT_NOW:
            return False
        if count < len(view):
            self.outgoing[0] = view[count:], message
            return True
        self.outgoing.popleft()
        message.is_done = not (self.outgoing and self.outgoing[0][1] is message)
        return True

    def _receive_some(self) -> bool:
        try:
            count = self._socket.recv_into(self._target[:_TURN_BYTES])
        except NOT_NOW:
            return False
        if count == 0:
            raise OSError("it has closed the connection")
        self._target = self._target[count:] or next(self._targets)
        return True

    def _follow_messages(self) -> Iterator[memoryview]:
        """Yields where the next bytes go: into the length of a message, then into the message."""
        length = bytearray(_LENGTH.size)
        while True:
            yield memoryview(length)
            (count,) = _LENGTH.unpack(length)
            message = self.incoming[0]
            if count > len(message.data):
                room = len(message.data)
                raise OSError(f"it sent {count} bytes where {room} were expected")
            yield message.data[:count]
            self.incoming.popleft()
            message.is_done = True

    def close(self, *, has_failed: bool = False) -> None:
        """Ends it, and what is under way. After a failure the peer can send no more, either."""
        self.outgoing.clear()
        self.incoming.clear()
        with contextlib.suppress(OSError):
            if has_failed:
                # Closes it with a reset.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_FOR_0_SECONDS)
            # Also where a process that was forked from this one has it still open.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
