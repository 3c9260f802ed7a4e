"""Messages from every rank to every other, each with a header in front."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from unisono.communicators.gloo import break_connections
from unisono.communicators.headers import HEADER_BYTES, Header, check_agreement
from unisono.communicators.watch import BrokenConnectionError, Watch
from unisono.errors import CommunicationError


class Exchange:
    """What a process group can do, under the eyes of a watch.

    A message is received into room for the largest that may come, because Gloo ends the process
    when one is larger than its buffer, as it is when ranks call different collectives.

    Args:
        group: A process group.
        watch: Finds out what is wrong when a wait takes long, and keeps the first error.
        owns_watch: Whether the watch is told what goes on here, and ends with this object.
        room: How many bytes may travel beside a header.
        speaks_for: For each rank of the group, the ranks of the whole that call what it calls.
    """

    def __init__(
        self,
        group: Any,
        watch: Watch,
        *,
        owns_watch: bool,
        room: int,
        speaks_for: Sequence[Sequence[int]],
    ) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.room = room
        self.watch = watch
        self.sequence = 0
        self._speaks_for = speaks_for
        self._group = group
        self._owns_watch = owns_watch
        self._stride = HEADER_BYTES + room
        self._received = torch.empty((self.size - 1) * self._stride, dtype=torch.uint8)
        self._end = weakref.finalize(self, _end, [group], watch if owns_watch else None)

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` may travel beside a header."""
        return tensor.nbytes <= self.room

    @contextmanager
    def collective(self, header: Header) -> Iterator[None]:
        """Surrounds a collective, which others hear of if it fails."""
        if self._group is None:
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

        Ranks of a part send what was called on the whole, of which the part may not see all.

        What is returned lies in memory that the next meeting uses again, and is longer than what
        was sent. There is nothing of one's own.

        Raises:
            UnequalCollectivesError: if the headers are not those of one collective.
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
        self._wait(self._group.alltoall_base(self._received, torch.cat(pieces), rooms, sent))
        packets = list(self._received.split(self._stride))
        packets.insert(self.rank, prefix)
        headers = self._agreed(called, encoded, packets)
        return headers, [packet[HEADER_BYTES:] for packet in packets]

    def all_to_all(
        self, output: Tensor, received: Sequence[int], given: Tensor, sent: Sequence[int]
    ) -> Callable[[], None]:
        """Begins to send each rank its part of `given`, of so many elements, and fill `output`.

        Returns what waits for the end of it.
        """
        size = given.itemsize
        work = self._group.alltoall_base(
            as_bytes(output),
            as_bytes(given),
            [length * size for length in received],
            [length * size for length in sent],
        )
        return lambda: self._wait(work)

    def add_up(self, tensor: Tensor) -> None:
        """Overwrites `tensor` with the sum of those of all ranks, in the order of the group."""
        self._wait(self._group.allreduce([tensor.detach()]))

    def broadcast(self, tensors: dict[int, Tensor]) -> None:
        """Overwrites each tensor with that of the rank it stands under."""
        works = [self._group.broadcast(as_bytes(tensors[root]), root) for root in tensors]
        for work in works:
            self._wait(work)

    def close(self) -> None:
        """Ends connections and threads. May be called twice."""
        self._group = None
        self._end()

    def _agreed(self, header: Header, encoded: bytes, packets: Sequence[Tensor]) -> list[Header]:
        raw = [packet[:HEADER_BYTES].numpy().tobytes() for packet in packets]
        if all(other == encoded for other in raw):
            return [header] * self.size
        headers = [Header.decode(other) for other in raw]
        spoken = zip(self._speaks_for, headers, strict=True)
        check_agreement({rank: one for ranks, one in spoken for rank in ranks})
        return headers

    def _wait(self, work: Any) -> None:
        self.watch.wait(_finished(work))


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, which are not copied."""
    return tensor.detach().view(-1).view(torch.uint8)


def _finished(work: Any) -> Callable[[float], bool]:
    def finished(seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if work.is_completed():
                raise BrokenConnectionError(str(error).splitlines()[0]) from error
            return False
        return True

    return finished


def _end(groups: list[Any], watch: Watch | None) -> None:
    group = groups.pop()
    if watch is not None:
        watch.close()
    if hasattr(group, "recv"):
        break_connections(group)
