"""What is under way between two ranks through Gloo.

Gloo does not end a wait for a message of which a part had moved when its connection broke, and it
breaks all connections when a wait is too late. So nobody waits for Gloo. A rank looks into the
memory that a message comes to: bytes arrive in order, and the last ones tell that all have come.

Gloo sends at once what the other rank has begun to receive, and asks before it sends anything else.
So there is always room for a few short messages, whatever they are. A long message goes to where it
belongs, under a tag that stands for its length, so that ranks which call different collectives
cannot mix up what they send. A byte answers every message that was not copied, and some of the
others, so that no more of them are under way than the other rank can take.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from unisono.communicators.gloo import receive, send
from unisono.communicators.gloo_memory import (
    COPIED_BYTES,
    MARK,
    SHORT_BYTES,
    Answered,
    Arrival,
    Closed,
    Message,
    Room,
    packed,
)

# Shorter messages have the same tag only if they have the same length.
TAGGED_BYTES = 1 << 29
# High, because programs that send through the same group use low ones.
_LONG, _SHORT, _ANSWER, _UNUSED = 0x40000000, 0x7FFFFF00, 0x7FFFFF01, 0x7FFFFF02
_EMPTY = torch.empty(0, dtype=torch.uint8)
_NUM_ROOMS = 4
# The last bytes of the room for a long message, until the message has come. That a message ends
# with the same bytes will not happen.
_NONCE_BYTES = 8
# So many answers may be missing before nothing more is copied.
_MOST_ANSWERS = 4


class Peer:
    """What is under way between this rank and another, which is `rank` in the group."""

    def __init__(self, group: Any, rank: int, peer: int) -> None:
        self.number, self._rank, self._group = peer, rank, group
        self._sent, self._received = Answered(), Answered()
        self._unanswered: deque[Message] = deque()
        # What was sent after the last message that is answered.
        self._copies: list[tuple[Tensor, Any]] = []
        # Gloo reads an answer until it has left, which is long before so many more are given.
        self._given: deque[Any] = deque(maxlen=256)
        self._coming: deque[tuple[Message, Tensor]] = deque()
        self._unopened: list[tuple[Message, Tensor]] = []
        self._rooms: deque[Room] = deque()
        self._used: list[Room] = []

    def send(self, data: Tensor) -> Message:
        """Begins to send bytes."""
        num_bytes = data.nbytes
        is_answered = self._sent.next(num_bytes)
        is_free = not is_answered or len(self._unanswered) < _MOST_ANSWERS
        is_copied = num_bytes <= COPIED_BYTES and is_free
        message = Message(self.number, is_done=is_copied)
        if is_answered:
            message.held = self._copies
            room = torch.empty(1, dtype=torch.uint8)
            message.arrival = Arrival(self._group, self._rank, _ANSWER, room, b"\0")
            self._unanswered.append(message)
        tag = _LONG + num_bytes % TAGGED_BYTES
        if num_bytes <= SHORT_BYTES:
            data, tag = packed(data), _SHORT
        elif is_copied:
            data = data.clone()
        self._copies.append((data, send(self._group, data, self._rank, tag)))
        self._copies = [] if is_answered else self._copies
        return message

    def receive(self, room: Tensor) -> Message:
        """Begins to receive bytes, at the next look."""
        message = Message(self.number)
        message.is_answered = self._received.next(room.nbytes)
        self._coming.append((message, room))
        self._unopened.append((message, room))
        return message

    def look(self) -> None:
        """Finds out what has come, and opens room for what is still to come."""
        while self._unanswered and self._unanswered[0].has_arrived():
            self._unanswered.popleft().end()
        while self._coming and self._has_come(*self._coming[0]):
            message, _ = self._coming.popleft()
            message.end()
            if message.is_answered:
                # A rank that closes needs no answer.
                with suppress(RuntimeError):
                    self._given.append(send(self._group, MARK, self._rank, _ANSWER))
        if self._unopened or self._used:
            self._open()

    def _has_come(self, message: Message, room: Tensor) -> bool:
        if room.nbytes > SHORT_BYTES:
            return message.has_arrived()
        rooms = self._rooms
        if not rooms or not rooms[0].take(room):
            return False
        self._used.append(rooms.popleft())
        return True

    def _open(self) -> None:
        # After what is sent: while Gloo sends in this thread, its own spins if something comes.
        for message, room in self._unopened:
            if room.nbytes > SHORT_BYTES:
                tag, last = _LONG + room.nbytes % TAGGED_BYTES, os.urandom(_NONCE_BYTES)
                message.arrival = Arrival(self._group, self._rank, tag, room, last)
        self._unopened = []
        # Several at once, which wakes the other rank up less often.
        if self._coming and len(self._rooms) <= _NUM_ROOMS // 2:
            for one in self._used or [Room() for _ in range(_NUM_ROOMS)]:
                one.open(self._group, self._rank, _SHORT)
                self._rooms.append(one)
            self._used = []

    def is_awaited(self) -> bool:
        """Whether something is still to come."""
        return bool(self._coming) or any(not message.is_done for message in self._unanswered)

    def check(self) -> None:
        """Raises if the connection is broken."""
        receive(self._group, _EMPTY, self._rank, _UNUSED)

    def sent(self) -> list[Any]:
        """Returns what Gloo may still have to send."""
        copies = [*(message.held for message in self._unanswered), self._copies]
        return [*(work for some in copies for _, work in some), *self._given]

    def close(self) -> None:
        """Lets go of Gloo. An error may keep this object alive, and others may look at it."""
        for message in (*self._unanswered, *(message for message, _ in self._coming)):
            message.let_go()
        self._group, self._rooms, self._given = Closed(), deque(), deque()
        self._used, self._copies = [], []
