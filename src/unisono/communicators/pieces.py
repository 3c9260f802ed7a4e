"""How large tensors are reduced: piece by piece, so that some are added up while others travel.

    two ranks   each sends its pieces to the other, and both add up the same
    more ranks  parts of a piece go to their ranks, and their sums back to all

Both send 2 (P - 1) / P of what each of P ranks has.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from unisono.communicators.communicator import slice_of
from unisono.communicators.exchange import Exchange
from unisono.communicators.sums import combine_into
from unisono.options import ReduceOp

# As much for each of two ranks, so that a part is worth a message.
_PIECE_BYTES = 1 << 20
_MOST_PIECE_BYTES = 8 << 20
# How many pieces are on their way to be added up; as many sums may be on their way back.
_IN_FLIGHT = 4


def lengths_of(num_elements: int, size: int) -> list[int]:
    """Returns how long the part of each rank is."""
    parts = [slice_of(rank, size, num_elements) for rank in range(size)]
    return [part.stop - part.start for part in parts]


class Pieces:
    """Reduces pieces of tensors, in memory that is kept for the next ones."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._rank, self._size = exchange.rank, exchange.size
        self._rooms = [torch.empty(0, dtype=torch.uint8) for _ in range(_IN_FLIGHT)]

    def of(self, terms: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Cuts flat terms into pieces."""
        first = terms[0]
        least = _PIECE_BYTES * self._size // 2
        num_bytes = min(max(first.nbytes // _IN_FLIGHT, least), _MOST_PIECE_BYTES)
        length = max(1, num_bytes // first.itemsize)
        return zip(*(term.split(length) for term in terms), strict=True)

    def reduced(
        self,
        op: ReduceOp,
        pieces: Iterable[Sequence[Tensor]],
        count: int | None,
        met: Callable[[], object],
    ) -> Iterator[Tensor]:
        """Reduces one piece after the other into its first term, which is yielded then.

        Args:
            op: How terms are combined.
            pieces: The terms of each piece, which may be made while others are under way.
            count: For a mean, what to divide the sum by.
            met: Called before anything is sent.
        """
        is_pair = self._size == 2
        send, combine = (
            (self._swap, _combined) if is_pair else (self.send_parts, self.begin_to_share)
        )
        num_shared = 0 if is_pair else _IN_FLIGHT
        sent: deque[tuple[Tensor, Callable[[], list[Tensor]]]] = deque()
        summed: deque[Callable[[], Tensor]] = deque()

        def go_on() -> Iterator[Tensor]:
            piece, received = sent.popleft()
            summed.append(combine(op, piece, received(), count))
            if len(summed) > num_shared:
                yield summed.popleft()()

        for number, piece in enumerate(pieces):
            if number == 0:
                met()
            if len(sent) == _IN_FLIGHT:
                yield from go_on()
            sent.append((piece[0], send(piece, number % _IN_FLIGHT)))
        while sent:
            yield from go_on()
        while summed:
            yield summed.popleft()()

    def begin_to_share(
        self, op: ReduceOp, output: Tensor, parts: list[Tensor], count: int | None
    ) -> Callable[[], Tensor]:
        """Adds up this rank's parts, and begins to fill `output` with the sums of all ranks."""
        shares = dict(enumerate(output.split(lengths_of(len(output), self._size))))
        combine_into(op, parts, [shares[self._rank]], count)
        wait = self._exchange.begin_to_broadcast(shares)

        def finish() -> Tensor:
            wait()
            return output

        return finish

    def send_parts(self, terms: Sequence[Tensor], turn: int | None) -> Callable[[], list[Tensor]]:
        """Begins to send every rank its part; returns what waits for this rank's parts."""
        lengths = lengths_of(len(terms[0]), self._size)
        own = slice_of(self._rank, self._size, len(terms[0]))
        received = self._room(turn, terms[0], (len(terms), self._size, lengths[self._rank]))
        waits = [
            self._exchange.all_to_all(room, [lengths[self._rank]] * self._size, term, lengths)
            for term, room in zip(terms, received, strict=True)
        ]

        def finish() -> list[Tensor]:
            for wait in waits:
                wait()
            by_term = [list(room.unbind()) for room in received]
            for parts, term in zip(by_term, terms, strict=True):
                parts[self._rank] = term[own]
            return [part for of_rank in zip(*by_term, strict=True) for part in of_rank]

        return finish

    def _swap(self, terms: Sequence[Tensor], turn: int) -> Callable[[], list[Tensor]]:
        """Begins to send all terms to the only other rank; returns what waits for those of both.

        It moves as many bytes as parts and sums would, in one step instead of two.
        """
        received = self._room(turn, terms[0], (len(terms), len(terms[0])))
        lengths = [0, len(terms[0])] if self._rank == 0 else [len(terms[0]), 0]
        waits = [
            self._exchange.all_to_all(room, lengths, term, lengths)
            for term, room in zip(terms, received, strict=True)
        ]

        def finish() -> list[Tensor]:
            for wait in waits:
                wait()
            return [*terms, *received] if self._rank == 0 else [*received, *terms]

        return finish

    def _room(self, turn: int | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Returns memory for a piece, which is kept for a later one."""
        if turn is None:
            return like.new_empty(shape)
        # Fresh memory would cost as much as what is received into it.
        num_bytes = math.prod(shape) * like.itemsize
        if len(self._rooms[turn]) < num_bytes:
            self._rooms[turn] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._rooms[turn][:num_bytes].view(like.dtype).view(shape)


def _combined(
    op: ReduceOp, output: Tensor, terms: list[Tensor], count: int | None
) -> Callable[[], Tensor]:
    """Adds up the terms of all ranks, which are all here."""
    combine_into(op, terms, [output], count)
    return lambda: output
