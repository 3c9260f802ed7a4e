"""Messages through Gloo, and the memory that they come to.

Bytes arrive in order, and the last ones tell that all have come.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from unisono.communicators.gloo import receive

# A message is short if it is no longer than this, and one that is received if its room is not.
SHORT_BYTES = 72 << 10
# A short message is its length, the complement of that, its bytes, and a mark. If length and
# complement fit, both have come, and tell where the mark is.
_LENGTH = struct.Struct("<QQ")
_ONES = (1 << 64) - 1
MARK = torch.ones(1, dtype=torch.uint8)
# Up to here a copy costs less than the wait for an answer, of which there is one for so many short
# or long copies.
COPIED_BYTES = 768 << 10
_SHORT_PER_ANSWER = 16
_LONG_PER_ANSWER = 4
# Gloo knows at once of a message of which the last bytes have come.
_SOON = timedelta(minutes=5)


def packed(data: Tensor) -> Tensor:
    """Returns a copy of a short message as it is sent."""
    length = bytearray(_LENGTH.pack(data.nbytes, data.nbytes ^ _ONES))
    return torch.cat((torch.frombuffer(length, dtype=torch.uint8), data, MARK))


class Message:
    """A message, and what Gloo uses until its end. A copy that is sent is done at once."""

    __slots__ = ("arrival", "held", "is_answered", "is_done", "peer")

    def __init__(self, peer: int, *, is_done: bool = False) -> None:
        self.peer, self.is_done, self.is_answered = peer, is_done, False
        self.let_go()

    def has_arrived(self) -> bool:
        """Whether all of it is in its memory."""
        return self.arrival is not None and self.arrival.has_come()

    def end(self) -> None:
        """Lets the rank that waits go on."""
        self.let_go()
        self.is_done = True

    def let_go(self) -> None:
        """Gives back what Gloo has used."""
        self.arrival: Arrival | None = None
        self.held: list[Any] = []


class Arrival:
    """Memory that Gloo receives into, and the last bytes, which change when all have come."""

    def __init__(self, group: Any, rank: int, tag: int, room: Tensor, last: bytes) -> None:
        self._last = last
        self._bytes = memoryview(room.numpy())[-len(last) :]  # type: ignore[arg-type]
        self._bytes[:] = last
        self._work = receive(group, room, rank, tag)

    def has_come(self) -> bool:
        """Whether all bytes are there."""
        if self._bytes == self._last:
            return False
        self._work.wait(_SOON)
        return True


class Room:
    """Memory for a message of at most so many bytes."""

    def __init__(self, num_bytes: int = SHORT_BYTES) -> None:
        # The first to go at the end, after which Gloo does not write any more.
        self._work: Any = None
        self._memory = torch.zeros(_LENGTH.size + num_bytes + 1, dtype=torch.uint8)
        self._bytes = memoryview(self._memory.numpy())  # type: ignore[arg-type]

    def open(self, group: Any, rank: int, tag: int) -> None:
        """Begins to receive."""
        self._work = receive(group, self._memory, rank, tag)

    def take(self, output: Tensor) -> bool:
        """Copies the message and clears the memory, if it has come; returns whether it has."""
        length, complement = _LENGTH.unpack_from(self._bytes)
        end = _LENGTH.size + length
        if length ^ complement != _ONES or not self._bytes[end]:
            return False
        self._work.wait(_SOON)
        # Ranks that call different collectives may send more than is expected.
        count = min(length, len(output))
        output[:count] = self._memory[_LENGTH.size : _LENGTH.size + count]
        self._memory[: end + 1] = 0
        return True


class Answered:
    """Knows on both sides which messages are answered."""

    def __init__(self) -> None:
        self._num_short = self._num_long = 0

    def next(self, num_bytes: int) -> bool:
        """Returns whether the next message is answered, which has so many bytes."""
        if num_bytes > COPIED_BYTES:
            return True
        if num_bytes > SHORT_BYTES:
            self._num_long += 1
            return self._num_long % _LONG_PER_ANSWER == 0
        self._num_short += 1
        return self._num_short % _SHORT_PER_ANSWER == 0


class Closed:
    """Takes the place of a group that nobody may use any more."""

    def send(self, *_: Any) -> None:
        """Raises what a broken connection does."""
        raise RuntimeError("another thread has closed it")

    recv = send
