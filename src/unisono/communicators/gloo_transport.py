"""Messages through Gloo, to and from all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from unisono.communicators.gloo import break_connections
from unisono.communicators.gloo_peer import SHORT_BYTES, Peer
from unisono.communicators.gloo_waiter import Message
from unisono.communicators.headers import HEADER_BYTES
from unisono.communicators.transport import BrokenConnectionError

_LOOK_SECONDS = 0.1
_END_SECONDS = 5.0


class GlooTransport:
    """Messages through a process group of torch.distributed with Gloo.

    Args:
        group: Made by `make_gloo_group`. After a failure its connections are broken.
        timeout_seconds: How long its user waits, and how long to wait at the end for others to
            receive what was sent.
        ranks: The ranks of the group that this transport connects, in order; all if not given.
    """

    def __init__(
        self, group: Any, timeout_seconds: float, ranks: Sequence[int] | None = None
    ) -> None:
        self.name = "Gloo"
        ranks = range(group.size()) if ranks is None else ranks
        self.rank = ranks.index(group.rank())
        self.size = len(ranks)
        self.packed_bytes = SHORT_BYTES - HEADER_BYTES
        self._timeout_seconds = timeout_seconds
        self._group = group
        self._peers = {
            peer: Peer(group, rank, peer, timeout_seconds)
            for peer, rank in enumerate(ranks)
            if peer != self.rank
        }

    def send(self, peer: int, data: Tensor) -> Message:
        """Begins to send bytes."""
        return self._begun(peer, lambda one: one.send(data))

    def receive(self, peer: int, room: Tensor) -> Message:
        """Begins to receive a message, which is at most as long as `room`.

        Where `room` is longer than `SHORT_BYTES`, the message is, too.
        """
        return self._begun(peer, lambda one: one.receive(room))

    def _begun(self, peer: int, begin: Callable[[Peer], Message]) -> Message:
        if peer not in self._peers:
            raise BrokenConnectionError("another thread has closed it")
        try:
            return begin(self._peers[peer])
        except RuntimeError as error:
            raise BrokenConnectionError(str(error).splitlines()[0], peer) from error

    def progress(self, messages: Sequence[Message], seconds: float) -> bool:
        """Waits until `messages` are done or the time is over; returns whether they are."""
        deadline = time.monotonic() + seconds
        while True:
            unended = [message for message in messages if not message.is_done]
            for message in messages:
                if message.error is not None:
                    raise BrokenConnectionError(message.error, message.peer)
            left = deadline - time.monotonic()
            if not unended or left <= 0:
                return not unended
            unended[0].wait(min(left, _LOOK_SECONDS))

    def awaited(self) -> list[int]:
        """Returns the ranks from which something is still to come."""
        return [rank for rank, peer in self._peers.items() if peer.is_awaited()]

    def set_timeout(self, seconds: float) -> None:
        """Sets how long its user waits."""
        self._timeout_seconds = seconds
        for peer in self._peers.values():
            peer.timeout_seconds = seconds

    def close(self, *, has_failed: bool) -> None:
        """Ends connections and threads, if all went well once others have what was sent."""
        is_well = not has_failed and not self.awaited()
        peers, self._peers = list(self._peers.values()), {}
        deadline = time.monotonic() + (self._timeout_seconds if is_well else 0.0)
        has_ended = False
        try:
            ended = [one.close(deadline, is_well=is_well) for one in peers]
            has_ended = is_well and all(ended)
        finally:
            if not has_ended and peers:
                break_connections(self._group)
                deadline = time.monotonic() + _END_SECONDS
                for one in peers:
                    one.close(deadline, is_well=False)
            self._group = None
