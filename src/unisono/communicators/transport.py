"""What carries messages between ranks: the one interface of TCP, Gloo and MPI."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from unisono.system import give_way

PACKED_BYTES = 512 << 10
# A rank that looks by itself whether something has come only gives way to others for so long. A
# rank that sleeps comes back 60 us too late.
_YIELD_SECONDS = 200e-6
# Then it sleeps for this share of the time that has passed, within limits.
_PAUSE_SHARE = 0.125
_MOST_SECONDS = 5e-3
_LEAST_SECONDS = 20e-6


def pause(passed: float, most: float) -> None:
    """Lets others have the core between two looks, after a wait of so many seconds."""
    if passed < _YIELD_SECONDS:
        give_way()
    else:
        time.sleep(min(max(_PAUSE_SHARE * passed, _LEAST_SECONDS), _MOST_SECONDS, most))


class BrokenConnectionError(Exception):
    """A connection that carries a collective has broken, for a reason that the watch is to find.

    Attributes:
        peer: The rank at the other end, if it is known.
    """

    def __init__(self, why: str, peer: int | None = None) -> None:
        super().__init__(why)
        self.peer = peer


class Transport(Protocol):
    """Messages of bytes between ranks. Those of one pair arrive in the order they were sent in.

    A tensor that is sent must not change, and one that is received must not be read, before its
    message is done. A connection that breaks raises a `BrokenConnectionError`.

    Attributes:
        name: In words, what carries the messages.
        packed_bytes: How many bytes are better sent in one message with a header than in another:
            up to here a copy costs less than a message.
        tagged_bytes: Shorter messages only go to where a message of the same length is expected,
            so that they can be received before it is known whether the ranks call the same.
    """

    name: str
    rank: int
    size: int
    packed_bytes: int = PACKED_BYTES
    tagged_bytes: int = 0

    def send(self, peer: int, data: Tensor) -> Any:
        """Begins to send bytes, at least one, and returns the message."""

    def receive(self, peer: int, room: Tensor) -> Any:
        """Begins to receive a message, and returns it.

        It may be shorter than `room` if that has no more than a header and `packed_bytes`.
        """

    def progress(self, messages: Sequence[Any], seconds: float) -> bool:
        """Moves bytes until `messages` are done or the time is over; returns whether they are."""

    def awaited(self) -> list[int]:
        """Returns the ranks from which something is still to come, as far as that is known."""

    def set_timeout(self, seconds: float) -> None:
        """Sets how long its user may wait, so that it does not give up before."""

    def close(self, *, has_failed: bool) -> None:
        """Ends connections and threads, also those that other threads wait for.

        After a failure peers cannot go on with what was sent before.
        """
