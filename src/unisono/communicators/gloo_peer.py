"""What is under way between two ranks through Gloo.

Gloo does not end a wait for a message of which a part had moved when its connection broke, and it
breaks all connections when a wait is too late. So nobody waits for data. An empty message follows
each one, which moves at once or not at all, and an empty one answers. Threads wait for these.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

_DATA, _ANSWER = 1, 2
_EMPTY = torch.empty(0, dtype=torch.uint8)
# The user of a transport has a deadline, and ends what is under way when it has passed.
_FOR_EVER = timedelta(days=1)
# Up to here a copy costs less than the wait for an answer. So many may be without one, and for the
# answers to small ones a thread wakes up now and then.
_COPIED_BYTES = 768 << 10
_SMALL_BYTES = 64 << 10
_MOST_COPIES = 32
_MOST_LARGE = 4
_BATCH = 16


class Message:
    """A message, and what Gloo uses until its end. A copy that is sent is done at once."""

    __slots__ = ("_ended", "error", "held", "is_done", "peer")

    def __init__(self, peer: int, held: Any, *, is_done: bool = False) -> None:
        self.peer, self.held, self.is_done = peer, held, is_done
        self.error: str | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def end(self, error: str | None) -> None:
        """Lets the thread that waits go on."""
        self.error = None if self.is_done else error
        self.held, self.is_done = None, True
        self._ended.release()

    def wait(self, seconds: float) -> None:
        """Returns when it has ended, or the time is over."""
        if self._ended.acquire(timeout=seconds):
            self._ended.release()


class _Waiter(threading.Thread):
    """Waits for empty messages of one peer, one after the other. It starts with the first."""

    def __init__(self, name: str, then: Callable[[Message], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.unended: set[Message] = set()
        self._begun: SimpleQueue[tuple[Any, Message] | None] = SimpleQueue()
        self._then = then

    def add(self, empty: Any, message: Message) -> None:
        self.unended.add(message)
        self._begun.put((empty, message))
        if self.ident is None:
            self.start()

    def run(self) -> None:
        while (begun := self._begun.get()) is not None:
            empty, message = begun
            try:
                empty.wait(_FOR_EVER)
                message.end(None)
            except RuntimeError as error:
                message.end(str(error).splitlines()[0])
            self.unended.discard(message)
            self._then(message)

    def close(self, seconds: float) -> None:
        self._begun.put(None)
        # The garbage collector may close this from within the thread.
        if self.ident is not None and self is not threading.current_thread():
            self.join(max(0.0, seconds))


class Peer:
    """What is under way between this rank and another."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank
        self._copies: list[tuple[Any, Message]] = []
        # Gloo reads an answer until it has left, which is long before so many more are given.
        self._given: deque[Any] = deque(maxlen=8 * _MOST_COPIES)
        answer = functools.partial(_answer, group, rank, self._given)
        self._coming = _Waiter(f"unisono gloo from {rank}", answer)
        self._answers = _Waiter(f"unisono gloo to {rank}", lambda _: None)

    def send(self, data: Tensor) -> Message:
        """Begins to send bytes."""
        is_small = data.nbytes <= _SMALL_BYTES
        num_unanswered = len(self._copies) + len(self._answers.unended)
        most = _MOST_COPIES if is_small else _MOST_LARGE
        is_copied = data.nbytes <= _COPIED_BYTES and num_unanswered < most
        data = data.clone() if is_copied else data
        answer = self._group.recv([_EMPTY], self._rank, _ANSWER)
        works = [self._group.send([one], self._rank, _DATA) for one in (data, _EMPTY)]
        message = Message(self._rank, (data, works), is_done=is_copied)
        self._copies.append((answer, message))
        if not is_small or not is_copied or len(self._copies) >= _BATCH:
            self._await_answers()
        return message

    def receive(self, room: Tensor) -> Message:
        """Begins to receive bytes."""
        works = [self._group.recv([one], self._rank, _DATA) for one in (room, _EMPTY)]
        message = Message(self._rank, (room, works))
        self._coming.add(works[1], message)
        return message

    def is_awaited(self) -> bool:
        """Whether something is still to come."""
        unended = [*self._coming.unended, *self._answers.unended]
        return any(not message.is_done for message in unended)

    def close(self, deadline: float) -> None:
        """Ends the threads, after what was sent has come or the time is over."""
        self._await_answers()
        for waiter in (self._answers, self._coming):
            waiter.close(deadline - time.monotonic())

    def _await_answers(self) -> None:
        copies, self._copies = self._copies, []
        for answer, message in copies:
            self._answers.add(answer, message)


def _answer(group: Any, rank: int, given: deque[Any], message: Message) -> None:
    if message.error is None:
        with suppress(RuntimeError):
            given.append(group.send([_EMPTY], rank, _ANSWER))
