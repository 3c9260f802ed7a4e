"""Small all-reduces, prepared once and run many times.

The rooms, the messages and the sums of an algorithm are the same in every all-reduce of one size.
What is left to do each time is to copy, to send, to receive and to add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.communicators.communicator import as_bytes
from unisono.communicators.executor import Executor, Piece
from unisono.communicators.headers import HEADER_BYTES
from unisono.communicators.link import Collective, Link
from unisono.options import ReduceOp

_Step = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass
class _Message:
    """What one peer gets, or where it comes to."""

    peer: int
    data: Tensor
    header: memoryview | None = None

    @property
    def content(self) -> Tensor:
        return self.data[0 if self.header is None else HEADER_BYTES :]


@dataclass
class _Round:
    """Sums, then messages in both directions."""

    steps: list[_Step] = field(default_factory=list)
    sends: list[_Message] = field(default_factory=list)
    receives: list[_Message] = field(default_factory=list)


class Plan:
    """An all-reduce of so many flat terms of one length and dtype. One thread at a time runs it."""

    def __init__(
        self,
        executor: Executor,
        link: Link,
        op: ReduceOp,
        like: tuple[torch.dtype, int, int],
        count: int | None,
    ) -> None:
        dtype, length, num_terms = like
        self._link = link
        self._terms = [torch.empty(length, dtype=dtype) for _ in range(num_terms)]
        self._output = torch.empty(length, dtype=dtype)
        self._rounds = [_Round()]
        self._known: tuple[set[int], set[int]] = (set(), set())
        self.is_small = True
        piece = Piece(executor, self, op, self._terms, count, self._output, self._add)
        for turn in executor.turns:
            piece.begin(turn)
            piece.end()
        piece.finish()
        if not self.is_small:
            self._rounds.clear()

    def run(self, collective: Collective, terms: Sequence[Tensor]) -> None:
        """Combines `terms` of all ranks into the first one."""
        header, link = collective.encoded, self._link
        transport = link.transport
        for own, term in zip(self._terms, terms, strict=True):
            own.copy_(term)
        for one in self._rounds:
            for function, args in one.steps:
                function(*args)
            for message in one.sends:
                if message.header is not None:
                    message.header[:] = header
            received = [transport.receive(message.peer, message.data) for message in one.receives]
            sent = [transport.send(message.peer, message.data) for message in one.sends]
            if received:
                link.wait(received)
            heads = ((one.peer, one.header) for one in one.receives if one.header is not None)
            collective.compare({peer: head.tobytes() for peer, head in heads})
            if sent:
                link.wait(sent)
        terms[0].copy_(self._output)

    def _add(self, *step: Any) -> None:
        self._rounds[-1].steps.append((step[0], step[1:]))

    # What a piece does with a collective.

    def send(self, peer: int, tensors: Sequence[Tensor]) -> list[Any]:
        """Notes that a peer gets tensors, which are copied into one message."""
        data = [as_bytes(tensor) for tensor in tensors if tensor.numel()]
        if message := self._message(peer, sum(map(len, data)), is_sent=True):
            sizes = [len(raw) for raw in data]
            for raw, place in zip(data, message.content.split(sizes), strict=True):
                self._add(Tensor.copy_, place, raw)
            self._rounds[-1].sends.append(message)
        return []

    def receive(self, peer: int, tensors: Sequence[Tensor]) -> Any:
        """Notes that a peer sends tensors, and returns them with the message that they come in."""
        message = self._message(peer, sum(tensor.nbytes for tensor in tensors), is_sent=False)
        if message:
            self._rounds[-1].receives.append(message)
        return message, tensors

    def meet(self, received: Any) -> None:
        """Does nothing: each round waits for its messages."""

    def finish(self, sent: Any, received: Sequence[Any]) -> None:
        """Notes that tensors are taken out of messages, with which the next round begins."""
        self._rounds.append(_Round())
        for message, tensors in received:
            sizes = [tensor.nbytes for tensor in tensors]
            parts = message.content[: sum(sizes)].split(sizes) if message else ()
            for tensor, part in zip(tensors, parts, strict=False):
                self._add(Tensor.copy_, as_bytes(tensor), part)

    def _message(self, peer: int, num_bytes: int, *, is_sent: bool) -> _Message | None:
        """Makes room for a message, with a header if it is the first. None if it is not small."""
        known = self._known[is_sent]
        is_first = peer not in known
        known.add(peer)
        if not self._link.is_packed(num_bytes) or not (is_first or num_bytes):
            self.is_small = False
            return None
        if not is_first:
            return _Message(peer, torch.empty(num_bytes, dtype=torch.uint8))
        data = (
            torch.empty(HEADER_BYTES + num_bytes, dtype=torch.uint8)
            if is_sent
            else self._link.room_of(peer)
        )
        return _Message(peer, data, memoryview(data.numpy())[:HEADER_BYTES])  # type: ignore[arg-type]
