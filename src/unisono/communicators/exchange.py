"""Messages from every rank to every other, each with a header in front."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unisono.communicators.headers import HEADER_BYTES, Header, check_agreement
from unisono.communicators.transport import BrokenConnectionError, Finished, Transport
from unisono.communicators.watch import Watch
from unisono.errors import CommunicationError


class Exchange:
    """What a transport can do, under the eyes of a watch.

    A header is received into room for the largest message that may come with it, since ranks may
    call different collectives, and Gloo ends the process when a message is larger than its buffer.

    Args:
        transport: What carries messages; closed with this object.
        watch: Finds out what is wrong when a wait takes long, and keeps the first error.
        owns_watch: Whether the watch is told what goes on here, and ends with this object.
        room: How many bytes may travel beside a header.
        speaks_for: For each rank of the transport, the ranks of the whole that call what it calls.
        ranks: The numbers that the watch has for the ranks of the transport.
    """

    def __init__(
        self,
        transport: Transport,
        watch: Watch,
        *,
        owns_watch: bool,
        room: int,
        speaks_for: Sequence[Sequence[int]],
        ranks: Sequence[int],
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.room = room
        self.watch = watch
        self.sequence = 0
        self._speaks_for = speaks_for
        self._ranks = ranks
        self._transport = transport
        self._owns_watch = owns_watch
        self._stride = HEADER_BYTES + room
        self._received = torch.empty((self.size - 1) * self._stride, dtype=torch.uint8)
        self._end = weakref.finalize(self, _end, transport, watch, owns_watch=owns_watch)

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` may travel beside a header."""
        return tensor.nbytes <= self.room

    @contextmanager
    def collective(self, header: Header) -> Iterator[None]:
        """Surrounds a collective, which others hear of if it fails."""
        if not self._end.alive:
            raise CommunicationError(
                f"Rank {self.rank} called {header} on a communicator that is closed. Make a new "
                "one with all ranks."
            )
        self.sequence = header.sequence
        with self.watch.collective(header) if self._owns_watch else self.watch.published_errors():
            yield

    def meet(
        self, header: Header, payloads: Sequence[Tensor | None]
    ) -> tuple[list[Header], list[Tensor]]:
        """Sends each rank a header and a payload of bytes, and returns what all ranks sent here.

        What is returned lies in memory that the next meeting uses again, and is longer than what
        was sent. This rank's own entry is empty.

        Raises:
            UnequalCollectivesError: if the headers are not those of one collective.
        """
        return self.begin_to_meet(header, payloads)()

    def begin_to_meet(
        self, header: Header, payloads: Sequence[Tensor | None]
    ) -> Callable[[], tuple[list[Header], list[Tensor]]]:
        """Begins a meeting, and returns what waits for the others and tells what they sent.

        Ranks of a part send what was called on the whole, of which the part may not see all.
        """
        called = header if self._owns_watch else self.watch.doing or header
        encoded = called.encode()
        prefix = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent, rooms = [0] * self.size, [0] * self.size
        pieces = []
        for rank in others:
            payload = payloads[rank]
            pieces += [prefix] if payload is None else [prefix, payload]
            sent[rank] = HEADER_BYTES + (0 if payload is None else len(payload))
            rooms[rank] = self._stride
        finished = self._transport.all_to_all(self._received, rooms, torch.cat(pieces), sent)

        def finish() -> tuple[list[Header], list[Tensor]]:
            self._wait(finished)
            packets = list(self._received.split(self._stride))
            packets.insert(self.rank, prefix)
            headers = self._agreed(called, encoded, packets)
            return headers, [packet[HEADER_BYTES:] for packet in packets]

        return finish

    def all_to_all(
        self, output: Tensor, received: Sequence[int], given: Tensor, sent: Sequence[int]
    ) -> Callable[[], None]:
        """Begins to send each rank its part of `given`, of so many elements, and fill `output`.

        Returns what waits for the end of it.
        """
        size = given.itemsize
        finished = self._transport.all_to_all(
            as_bytes(output),
            [length * size for length in received],
            as_bytes(given),
            [length * size for length in sent],
        )
        return lambda: self._wait(finished)

    def broadcast(self, tensors: Mapping[int, Tensor]) -> None:
        """Overwrites each tensor with that of the rank it stands under."""
        self.begin_to_broadcast(tensors)()

    def begin_to_broadcast(self, tensors: Mapping[int, Tensor]) -> Callable[[], None]:
        """Begins to overwrite each tensor, and returns what waits for the end of it."""
        raw = {root: as_bytes(tensor) for root, tensor in tensors.items() if tensor.numel()}
        finished = self._transport.broadcast(raw)
        return lambda: self._wait(finished)

    def set_timeout(self, seconds: float) -> None:
        """Says how long to wait for other ranks."""
        self.watch.timeout_seconds = seconds
        self._transport.set_timeout(seconds)

    def close(self) -> None:
        """Ends connections and threads. May be called twice."""
        self._end()

    def _agreed(self, header: Header, encoded: bytes, packets: Sequence[Tensor]) -> list[Header]:
        raw = [packet[:HEADER_BYTES].numpy().tobytes() for packet in packets]
        if all(other == encoded for other in raw):
            return [header] * self.size
        headers = [Header.decode(other) for other in raw]
        spoken = zip(self._speaks_for, headers, strict=True)
        check_agreement({rank: one for ranks, one in spoken for rank in ranks})
        return headers

    def _wait(self, finished: Finished) -> None:
        try:
            self.watch.wait(finished, self._awaited)
        except BrokenConnectionError as error:
            peer = None if error.peer is None else self._ranks[error.peer]
            raise self.watch.broken(peer, str(error)) from error

    def _awaited(self) -> list[int]:
        return [self._ranks[rank] for rank in self._transport.awaited()]


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, which are not copied."""
    return tensor.detach().view(-1).view(torch.uint8)


def _end(transport: Transport, watch: Watch, *, owns_watch: bool) -> None:
    has_failed = watch.failure is not None
    if owns_watch:
        watch.close()
    transport.close(has_failed=has_failed)
