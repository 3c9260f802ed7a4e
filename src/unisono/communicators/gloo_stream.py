"""The messages of a watch, through the connections of a Gloo group."""

from __future__ import annotations

import errno
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from unisono.communicators.gloo import keep_for, receive, send
from unisono.communicators.gloo_memory import Closed, Room, packed

# High, because programs that send through the same group use low ones.
_TAG, _UNUSED = 0x7FFFFF03, 0x7FFFFF04
_EMPTY = torch.empty(0, dtype=torch.uint8)
_ROOM_BYTES = 2 << 10
# Gloo delivers what there is room for, though this process is busy. The longest message, which
# tells what each rank does, grows with their number.
_NUM_ROOMS = 8
_RANKS_PER_ROOM = 16
# How often to look whether the connection is broken. Gloo keeps a few bytes for every look.
_CHECK_SECONDS = 30.0
# For so long after a message, every look for an answer is also a look at the connection.
_ANSWER_SECONDS = 10.0


class GlooStream:
    """Bytes to and from another rank of a Gloo group, none of them zero.

    It reads and writes as a socket does that never blocks. It has no file descriptor to wait for.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank
        self._urgent_until = self._next_check = 0.0
        # Gloo reads a message until it has left, which is long before so many more are given.
        self._sent: deque[tuple[Tensor, Any]] = deque(maxlen=256)
        self._rooms: deque[Room] = deque()
        for _ in range(_NUM_ROOMS + group.size() // _RANKS_PER_ROOM):
            self._open(Room(_ROOM_BYTES))

    def fileno(self) -> int:
        """Returns what a socket without a file descriptor returns."""
        return -1

    def settimeout(self, seconds: float | None) -> None:
        """Does nothing: it never blocks."""

    def send(self, data: bytes | bytearray) -> int:
        """Sends some of the bytes, and returns how many."""
        message = packed(torch.frombuffer(bytearray(data[:_ROOM_BYTES]), dtype=torch.uint8))
        try:
            self._sent.append((message, send(self._group, message, self._rank, _TAG)))
        except RuntimeError as error:
            raise _as_os_error(error) from error
        self._urgent_until = time.monotonic() + _ANSWER_SECONDS
        self._next_check = 0.0
        return min(len(data), _ROOM_BYTES)

    def recv(self, num_bytes: int) -> bytes:
        """Returns bytes that have come, whatever their number, or raises why there are none."""
        # First: what had come before the connection broke is still read.
        error = self._error()
        data = torch.zeros(_ROOM_BYTES, dtype=torch.uint8)
        if self._rooms and self._rooms[0].take(data):
            self._open(self._rooms.popleft())
            return data.numpy().tobytes().rstrip(b"\0")
        raise error or BlockingIOError(errno.EAGAIN, "nothing has come")

    def shutdown(self, how: int) -> None:
        """Does nothing: the connection is used by others, too."""

    def close(self) -> None:
        """Lets go of the group. What still comes must find room, or nothing else would come."""
        keep_for(self._group, [*self._rooms, *self._sent])
        self._group = Closed()
        self._rooms.clear()
        self._sent.clear()

    def _open(self, room: Room) -> None:
        try:
            room.open(self._group, self._rank, _TAG)
            self._rooms.append(room)
        except RuntimeError:
            self._next_check = 0.0

    def _error(self) -> OSError | None:
        """Returns why the connection is broken, if it is and there is reason to look."""
        now = time.monotonic()
        if now < self._next_check:
            return None
        self._next_check = now if now < self._urgent_until else now + _CHECK_SECONDS
        try:
            receive(self._group, _EMPTY, self._rank, _UNUSED)
        except RuntimeError as error:
            self._next_check = 0.0
            return _as_os_error(error)
        return None


def _as_os_error(error: RuntimeError) -> OSError:
    text = str(error).splitlines()[0]
    is_cut_off = any(why in text for why in ("Connection timed out", "No route", "unreachable"))
    return OSError(errno.ETIMEDOUT if is_cut_off else errno.ECONNRESET, text)
