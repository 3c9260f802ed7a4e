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

from unisono.algorithms.rounds import Turn
from unisono.communicators.communicator import as_bytes
from unisono.communicators.executor import Executor, Sums
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
        self._sums = Sums(executor, op, self._terms, self._output, count, self._add)
        self._known: tuple[set[int], set[int]] = (set(), set())
        self.is_small = all(self._prepare(turn) for turn in executor.turns)
        if self.is_small:
            for part in executor.results:
                self._sums.value(part, self._sums.all)

    def run(self, collective: Collective, terms: Sequence[Tensor]) -> None:
        """Combines `terms` of all ranks into the first one."""
        header, link = collective.encoded, self._link
        for own, term in zip(self._terms, terms, strict=True):
            own.copy_(term)
        for one in self._rounds:
            for function, args in one.steps:
                function(*args)
            for message in one.sends:
                if message.header is not None:
                    message.header[:] = header
            received = [link.receive(message.peer, message.data) for message in one.receives]
            sent = [link.send(message.peer, message.data) for message in one.sends]
            if received:
                link.wait(received)
            heads = ((one.peer, one.header) for one in one.receives if one.header is not None)
            collective.compare({peer: head.tobytes() for peer, head in heads})
            if sent:
                link.wait(sent)
        terms[0].copy_(self._output)

    def _add(self, *step: Any) -> None:
        self._rounds[-1].steps.append((step[0], step[1:]))

    def _prepare(self, turn: Turn) -> bool:
        """Prepares a round; returns whether each of its messages is small."""
        now, then = self._rounds[-1], _Round()
        sums, slices = self._sums, self._sums.slices
        receivers, senders = turn.peers
        for peer in receivers:
            given = [sums.value(part, node) for to, part, node in turn.sends if to == peer]
            data = [as_bytes(tensor) for tensor in given if tensor.numel()]
            message = self._message(peer, sum(map(len, data)), is_sent=True)
            if message is None:
                return False
            rest = message.data[0 if message.header is None else HEADER_BYTES :]
            for raw, place in zip(data, rest.split([len(raw) for raw in data]), strict=True):
                self._add(Tensor.copy_, place, raw)
            now.sends.append(message)
        self._rounds.append(then)
        for peer in senders:
            wanted = [(part, node) for of, part, node in turn.receives if of == peer]
            sizes = [sums.num_bytes(*one) for one in wanted]
            message = self._message(peer, sum(sizes), is_sent=False)
            if message is None:
                return False
            start = 0 if message.header is None else HEADER_BYTES
            for (part, node), num_bytes in zip(wanted, sizes, strict=True):
                length = slices[part].stop - slices[part].start
                room = torch.empty(length, dtype=sums.dtype(node))
                if node == sums.all:
                    room = self._output[slices[part]]
                self._add(Tensor.copy_, as_bytes(room), message.data[start : start + num_bytes])
                sums.held[part][node] = room
                start += num_bytes
            now.receives.append(message)
        return True

    def _message(self, peer: int, num_bytes: int, *, is_sent: bool) -> _Message | None:
        """Makes room for a message, with a header if it is the first. None if it is not small."""
        known = self._known[is_sent]
        is_first = peer not in known
        known.add(peer)
        if not self._link.is_packed(num_bytes) or not (is_first or num_bytes):
            return None
        if not is_first:
            return _Message(peer, torch.empty(num_bytes, dtype=torch.uint8))
        data = (
            torch.empty(HEADER_BYTES + num_bytes, dtype=torch.uint8)
            if is_sent
            else self._link.room_of(peer)
        )
        return _Message(peer, data, memoryview(data.numpy())[:HEADER_BYTES])  # type: ignore[arg-type]
