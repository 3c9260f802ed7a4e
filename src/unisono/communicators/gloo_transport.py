"""Messages through Gloo, to and from all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from unisono.communicators.gloo import break_connections, have_left
from unisono.communicators.gloo_memory import SHORT_BYTES, Message
from unisono.communicators.gloo_peer import TAGGED_BYTES, Peer
from unisono.communicators.headers import HEADER_BYTES
from unisono.communicators.transport import BrokenConnectionError, Transport, pause

# A wait looks not less often than this, and later on after a smaller part of the time.
_OFTEN_SECONDS = 5e-4
# How often it looks whether a connection is broken.
_CHECK_SECONDS = 0.2


class GlooTransport(Transport):
    """Messages through a process group of torch.distributed with Gloo.

    Gloo's own thread moves the bytes. It wakes nobody up: a rank that waits looks from time to time
    whether they have come.

    Args:
        group: After a failure its connections are broken.
        timeout_seconds: How long to wait at the end for what was sent to leave.
        ranks: The ranks of the group that this transport connects, in order; all if not given.
    """

    name = "Gloo"
    packed_bytes = SHORT_BYTES - HEADER_BYTES
    tagged_bytes = TAGGED_BYTES

    def __init__(
        self, group: Any, timeout_seconds: float, ranks: Sequence[int] | None = None
    ) -> None:
        ranks = range(group.size()) if ranks is None else ranks
        self.rank = ranks.index(group.rank())
        self.size = len(ranks)
        self._timeout_seconds = timeout_seconds
        self._group = group
        self._peers = {
            peer: Peer(group, rank, peer) for peer, rank in enumerate(ranks) if peer != self.rank
        }
        self._checked = 0.0

    def send(self, peer: int, data: Tensor) -> Message:
        return self._begun(peer, lambda one: one.send(data))

    def receive(self, peer: int, room: Tensor) -> Message:
        """Begins to receive a message, which is at most as long as `room`.

        Where `room` is longer than `SHORT_BYTES`, the message is exactly as long.
        """
        return self._begun(peer, lambda one: one.receive(room))

    def _begun(self, peer: int, begin: Callable[[Peer], Message]) -> Message:
        if peer not in self._peers:
            raise BrokenConnectionError("another thread has closed it")
        try:
            return begin(self._peers[peer])
        except RuntimeError as error:
            raise _broken(peer, error) from error

    def progress(self, messages: Sequence[Message], seconds: float) -> bool:
        began = time.monotonic()
        while True:
            self._look()
            if all(message.is_done for message in messages):
                return True
            if not self._peers:
                raise BrokenConnectionError("another thread has closed it")
            now = time.monotonic()
            left = began + seconds - now
            if left <= 0:
                return False
            if now - self._checked > _CHECK_SECONDS:
                self._check(now)
            passed = now - began
            pause(passed, min(max(passed / 64, _OFTEN_SECONDS), left))

    def _look(self) -> None:
        for one in tuple(self._peers.values()):
            try:
                one.look()
            except RuntimeError as error:
                raise _broken(one.number, error) from error

    def _check(self, now: float) -> None:
        """Raises if a connection is broken through which something is still to come."""
        self._checked = now
        for peer, one in tuple(self._peers.items()):
            try:
                if one.is_awaited():
                    one.check()
            except RuntimeError as error:
                # All may have come before the connection broke.
                self._look()
                if one.is_awaited():
                    raise _broken(peer, error) from error

    def awaited(self) -> list[int]:
        self._look()
        return [peer for peer, one in tuple(self._peers.items()) if one.is_awaited()]

    def set_timeout(self, seconds: float) -> None:
        self._timeout_seconds = seconds

    def close(self, *, has_failed: bool) -> None:
        """Ends connections, if all went well once what was sent has left."""
        is_well = False
        with suppress(BrokenConnectionError):
            is_well = not has_failed and not self.awaited()
        peers, self._peers = list(self._peers.values()), {}

        def check() -> None:
            for one in peers:
                one.check()

        has_left = False
        try:
            sent = [work for one in peers for work in one.sent()]
            has_left = is_well and have_left(sent, self._timeout_seconds, check)
        finally:
            if peers and not has_left:
                break_connections(self._group)
            for one in peers:
                one.close()
            self._group = None


def _broken(peer: int, error: RuntimeError) -> BrokenConnectionError:
    return BrokenConnectionError(str(error).splitlines()[0], peer)
