"""Unisono's own connections between all ranks, over TCP.

There is no thread: bytes move while a rank waits, in both directions at the same time, and in
between through the buffers of the kernel.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from unisono.communicators.connection import Connection, Message
from unisono.communicators.transport import BrokenConnectionError, Transport


class Mesh(Transport):
    """Connections of one rank to all others."""

    name = "TCP"

    def __init__(self, rank: int, connections: Mapping[int, Connection]) -> None:
        self.rank = rank
        self.size = len(connections) + 1
        self._connections = connections

    def send(self, peer: int, data: Tensor) -> Message:
        return self._connections[peer].send(data)

    def receive(self, peer: int, room: Tensor) -> Message:
        return self._connections[peer].receive(room)

    def progress(self, messages: Sequence[Message], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            busy = [one for one in self._connections.values() if one.outgoing or one.incoming]
            has_moved = sum([one.move() for one in busy]) > 0
            if all(message.is_done for message in messages):
                return True
            if not busy:
                raise BrokenConnectionError("another thread has closed it")
            if has_moved:
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poll = select.poll()
            for connection in busy:
                connection.watch_with(poll)
            poll.poll(math.ceil(left * 1000))

    def awaited(self) -> list[int]:
        return [peer for peer, connection in self._connections.items() if connection.incoming]

    def set_timeout(self, seconds: float) -> None:
        """Does nothing: a connection never gives up by itself."""

    def close(self, *, has_failed: bool = False) -> None:
        for connection in self._connections.values():
            connection.close(has_failed=has_failed)
