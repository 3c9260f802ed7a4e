"""A transport under the eyes of a watch, with a header in front of the first message of each pair.

A rank may send on before it has heard from a peer. It receives more from that peer only once it has
seen the header, unless the transport keeps messages of different lengths apart. So ranks that call
different collectives find out before anything is mixed up, and nobody waits for a header alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.communicators.communicator import as_bytes
from unisono.communicators.headers import HEADER_BYTES, Header, check_agreement
from unisono.communicators.transport import BrokenConnectionError, Transport
from unisono.communicators.watch import Watch
from unisono.errors import CommunicationError

# What the messages with headers of all ranks may take together, but for very many ranks.
_ALL_PACKED_BYTES = 16 << 20
_LEAST_PACKED_BYTES = 64 << 10


class Part(NamedTuple):
    """The ranks of a transport, which may be some of those of a watch.

    Attributes:
        ranks: The numbers that the watch has for them.
        speaks_for: For each of them, the ranks that call what it calls.
        group: A Gloo group of all ranks of the watch, if there is one.
    """

    watch: Watch
    ranks: Sequence[int]
    speaks_for: Sequence[Sequence[int]]
    group: Any = None


class Link:
    """What a transport can do, with headers and with errors that name the ranks at fault."""

    def __init__(
        self,
        transport: Transport,
        part: Part,
        *,
        owns_watch: bool,
        packed_bytes: int | None = None,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.watch = watch = part.watch
        self.sequence = 0
        if packed_bytes is None:
            packed_bytes = max(_ALL_PACKED_BYTES // self.size, _LEAST_PACKED_BYTES)
        self._packed_bytes = min(transport.packed_bytes, packed_bytes)
        self._part = part
        self.transport = transport
        self._owns_watch = owns_watch
        self._rooms: dict[int, Tensor] = {}
        self._end = weakref.finalize(self, _end, transport, watch, owns_watch=owns_watch)

    @contextmanager
    def collective(self, header: Header) -> Iterator[Collective]:
        """Surrounds a collective, which others hear of if it fails."""
        if not self._end.alive:
            raise CommunicationError(
                f"Rank {self.rank} called {header} on a closed communicator. Make a new one with "
                "all ranks."
            )
        self.sequence = header.sequence
        with self.watch.collective(header) if self._owns_watch else self.watch.published_errors():
            # Ranks of a part send what was called on the whole, of which the part may not see all.
            called = header if self._owns_watch else self.watch.doing or header
            try:
                yield Collective(self, called)
            except BrokenConnectionError as error:
                peer = None if error.peer is None else self._part.ranks[error.peer]
                raise self.watch.broken(peer, str(error)) from error

    def is_packed(self, num_bytes: int) -> bool:
        """Whether so many bytes travel in one message with a header."""
        return num_bytes <= self._packed_bytes

    def is_tagged(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors can begin to be received before the header has come."""
        return all(tensor.nbytes < self.transport.tagged_bytes for tensor in tensors)

    def room_of(self, peer: int) -> Tensor:
        """Returns the room for the first message of a peer, whatever it calls."""
        if peer not in self._rooms:
            num_bytes = HEADER_BYTES + self._packed_bytes
            self._rooms[peer] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._rooms[peer]

    def wait(self, messages: Sequence[Any]) -> None:
        """Returns when `messages` are done."""
        self.watch.wait(partial(self.transport.progress, messages), self._awaited)

    def push(self) -> None:
        """Lets what was begun be on its way while this rank does something else."""
        self.transport.progress((), 0.0)

    def check(self, headers: Mapping[int, Header]) -> None:
        """Raises unless the headers, by rank, are those of one collective."""
        check_agreement(
            {r: one for rank, one in headers.items() for r in self._part.speaks_for[rank]}
        )

    def set_timeout(self, seconds: float) -> None:
        """Sets how long to wait for other ranks."""
        self.watch.timeout_seconds = seconds
        self.transport.set_timeout(seconds)

    def close(self) -> None:
        """Ends connections and threads. May be called twice."""
        self._end()

    def _awaited(self) -> list[int]:
        return [self._part.ranks[rank] for rank in self.transport.awaited()]


class Collective:
    """One collective, as one rank calls it."""

    def __init__(self, link: Link, header: Header) -> None:
        self.link = link
        self.headers = {link.rank: header}
        self.encoded = header.encode()
        self._greeted: set[int] = set()
        self._awaited: set[int] = set()

    def send(self, peer: int, tensors: Sequence[Tensor]) -> list[Any]:
        """Begins to send tensors, with a header in front of the first message to a peer."""
        data = [as_bytes(tensor) for tensor in tensors if tensor.numel()]
        is_first = peer not in self._greeted
        self._greeted.add(peer)
        prefix = torch.frombuffer(bytearray(self.encoded), dtype=torch.uint8) if is_first else None
        if self.link.is_packed(sum(map(len, data))):
            data = data if prefix is None else [prefix, *data]
            data = [torch.cat(data)] if len(data) > 1 else data
        elif prefix is not None:
            data = [prefix, *data]
        return [self.link.transport.send(peer, one) for one in data]

    def receive(self, peer: int, tensors: Sequence[Tensor]) -> Received:
        """Begins to receive what a peer sends in the same way, into `tensors`."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if peer not in self._awaited:
            self._awaited.add(peer)
            room = self.link.room_of(peer)
            first = Received(peer, list(tensors), room, [self.link.transport.receive(peer, room)])
            if not self.link.is_packed(num_bytes) and self.link.is_tagged(tensors):
                first.rest = self._receive_into(peer, tensors)
            return first
        if len(tensors) > 1 and self.link.is_packed(num_bytes) and num_bytes:
            room = torch.empty(num_bytes, dtype=torch.uint8)
            return Received(peer, list(tensors), room, [self.link.transport.receive(peer, room)])
        return Received(peer, list(tensors), None, self._receive_into(peer, tensors))

    def _receive_into(self, peer: int, tensors: Sequence[Tensor]) -> list[Any]:
        return [self.link.transport.receive(peer, as_bytes(one)) for one in tensors if one.numel()]

    def meet(self, received: Sequence[Received]) -> None:
        """Waits for headers before which nothing else can be received from a peer.

        What was begun is on its way while this rank does something else.
        """
        self.link.push()
        if not self.link.is_tagged([tensor for one in received for tensor in one.tensors]):
            self._meet(received)

    def _meet(self, received: Sequence[Received]) -> None:
        new = [one for one in received if one.peer not in self.headers]
        if new:
            self.hear(new)
            self.open(new)

    def hear(self, new: Sequence[Received]) -> None:
        """Waits for headers, and looks whether all ranks call the same."""
        self.link.wait([message for one in new for message in one.messages])
        rooms = {one.peer: one.room for one in new if one.room is not None}
        heads = {peer: room[:HEADER_BYTES].numpy().tobytes() for peer, room in rooms.items()}
        self.compare(heads)

    def compare(self, heads: Mapping[int, bytes]) -> None:
        """Looks whether ranks whose headers have come call what this one does."""
        own = self.headers[self.link.rank]
        for peer, head in heads.items():
            self.headers[peer] = own if head == self.encoded else Header.decode(head)
        if any(self.headers[peer] is not own for peer in heads):
            self.link.check(dict(sorted(self.headers.items())))

    def open(self, new: Sequence[Received]) -> None:
        """Takes what came with headers, and begins to receive the rest."""
        for one in new:
            one.messages = []
            if self.link.is_packed(sum(tensor.nbytes for tensor in one.tensors)):
                one.unpack(HEADER_BYTES)
            else:
                one.messages = one.rest or self._receive_into(one.peer, one.tensors)
            one.room = None

    def finish(self, sent: Iterable[Any], received: Sequence[Received]) -> None:
        """Waits until all messages are done, with the first headers of peers among them."""
        self._meet(received)
        messages = [*sent, *(message for one in received for message in one.messages)]
        if messages:
            self.link.wait(messages)
        for one in received:
            if one.room is not None:
                one.unpack(0)


@dataclass(eq=False)
class Received:
    """Tensors that a peer sends, and the messages that they come in."""

    peer: int
    tensors: list[Tensor]
    room: Tensor | None
    messages: list[Any]
    # Messages after the one with the header, if they are received before it has come.
    rest: list[Any] = field(default_factory=list)

    def unpack(self, start: int) -> None:
        """Copies tensors out of the room that they came in."""
        assert self.room is not None
        for tensor in self.tensors:
            as_bytes(tensor).copy_(self.room[start : start + tensor.nbytes])
            start += tensor.nbytes


def _end(transport: Transport, watch: Watch, *, owns_watch: bool) -> None:
    if owns_watch:
        watch.close()
    transport.close(has_failed=watch.has_failed)
