"""What is under way between two ranks through Gloo.

Gloo takes three packets per message: one says that something is to be sent, one that there is room
for it, and one has the bytes. It does not end a wait for a message of which a part had moved when
its connection broke, and it breaks all connections when a wait is too late. So nobody waits for a
long message: an empty one follows it, which moves at once or not at all. Short messages move at
once but for bad luck. An empty message answers those that were not copied, and some of the others,
so that no more of them are under way than the other rank can take.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from unisono.communicators.gloo_waiter import Message, Waiter

# A message is short if it is no longer than this, and one that is received if its room is not.
SHORT_BYTES = 72 << 10
# High, because programs that send through the same group use low ones.
_DATA, _ANSWER = 0x7FFFFF00, 0x7FFFFF01
_EMPTY = torch.empty(0, dtype=torch.uint8)
# The user of a transport has a deadline, and ends what is under way when it has passed. With bad
# luck a short message is not ended by that, and a thread waits so many times as long.
_FOR_EVER = timedelta(days=1)
_LONGER = 3
# Up to here a copy costs less than the wait for an answer. So many answers may be missing, each of
# which is for so many short or long copies.
_COPIED_BYTES = 768 << 10
_MOST_ANSWERS = 4
_SHORT_PER_ANSWER = 16
_LONG_PER_ANSWER = 4


class _Answered:
    """Knows on both sides which messages are answered."""

    def __init__(self) -> None:
        self._num_short = self._num_long = 0

    def next(self, num_bytes: int) -> bool:
        """Returns whether the next message is answered, which has so many bytes."""
        if num_bytes > _COPIED_BYTES:
            return True
        if num_bytes > SHORT_BYTES:
            self._num_long += 1
            return self._num_long % _LONG_PER_ANSWER == 0
        self._num_short += 1
        return self._num_short % _SHORT_PER_ANSWER == 0


class Peer:
    """What is under way between this rank and another.

    Args:
        group: A process group of torch.distributed with Gloo.
        rank: The number of the other in the group.
        peer: Its number in the transport.
        timeout_seconds: How long the user of the transport waits.
    """

    def __init__(self, group: Any, rank: int, peer: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._group, self._rank, self._peer = group, rank, peer
        self._sent, self._received = _Answered(), _Answered()
        # What was sent since the last message that is answered, and then all that was before.
        self._copies: list[tuple[Any, Message]] = []
        # Gloo reads an answer until it has left, which is long before so many more are given.
        self._given: deque[Any] = deque(maxlen=256)
        self._coming = Waiter(f"unisono gloo from {peer}")
        self._answers = Waiter(f"unisono gloo to {peer}")

    def send(self, data: Tensor) -> Message:
        """Begins to send bytes."""
        is_answered = self._sent.next(data.nbytes)
        is_free = not is_answered or len(self._answers.unended) < _MOST_ANSWERS
        is_copied = data.nbytes <= _COPIED_BYTES and is_free
        data = data.clone() if is_copied else data
        answer = self._group.recv([_EMPTY], self._rank, _ANSWER) if is_answered else None
        works = [self._group.send([one], self._rank, _DATA) for one in self._parts(data)]
        message = Message(self._peer, (data, works, self._copies), is_done=is_copied)
        if is_answered:
            self._copies = []
            self._answers.add(answer, _FOR_EVER, message)
        else:
            message.held = data, works
            self._copies.append((works[-1], message))
        return message

    def receive(self, room: Tensor) -> Message:
        """Begins to receive bytes."""
        is_answered = self._received.next(room.nbytes)
        works = [self._group.recv([one], self._rank, _DATA) for one in self._parts(room)]
        message = Message(self._peer, (room, works))
        limit = self._limit() if room.nbytes <= SHORT_BYTES else _FOR_EVER
        self._coming.add(works[-1], limit, message, self._answer if is_answered else None)
        return message

    def is_awaited(self) -> bool:
        """Whether something is still to come."""
        unended = [*self._coming.unended, *self._answers.unended]
        return any(not message.is_done for message in unended)

    def close(self, deadline: float, *, is_well: bool) -> bool:
        """Ends the threads, if all went well after what was sent has left or the time is over.

        Returns:
            Whether nothing is under way any more.
        """
        if is_well:
            for work, message in self._copies:
                self._answers.add(work, self._limit(), message)
            self._copies = []
        waiters = (self._answers, self._coming)
        return sum([one.close(deadline - time.monotonic()) for one in waiters]) == len(waiters)

    def _answer(self) -> None:
        with suppress(RuntimeError):
            self._given.append(self._group.send([_EMPTY], self._rank, _ANSWER))

    def _parts(self, data: Tensor) -> list[Tensor]:
        return [data] if data.nbytes <= SHORT_BYTES else [data, _EMPTY]

    def _limit(self) -> timedelta:
        return timedelta(seconds=_LONGER * self.timeout_seconds)
