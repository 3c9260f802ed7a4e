"""Runs the algorithms of `unisono.algorithms` between ranks.

A large tensor goes in pieces, so that some are added up while others travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.algorithms.nodes import Node, children
from unisono.algorithms.rounds import Rounds, Turn, turns_of
from unisono.communicators.communicator import slice_of
from unisono.communicators.link import Collective, Received
from unisono.kernels import combine_into, divide, undivided, wide_dtype
from unisono.options import ReduceOp

# How many pieces are under way in each round.
_IN_FLIGHT = 4
# As much for each of two ranks, so that a part is worth a message.
_PIECE_BYTES = 1 << 20
_MOST_PIECE_BYTES = 8 << 20


def pieces_of(terms: Sequence[Tensor], num_ranks: int) -> Iterator[tuple[Tensor, ...]]:
    """Cuts flat terms into pieces."""
    first = terms[0]
    least = _PIECE_BYTES * num_ranks // 2
    num_bytes = min(max(first.nbytes // _IN_FLIGHT, least), _MOST_PIECE_BYTES)
    return zip(*(term.split(max(1, num_bytes // first.itemsize)) for term in terms), strict=True)


class Executor:
    """Runs one algorithm for one rank, with memory that is kept for the next time.

    Args:
        root: The rank whose tensor all others get; None for a sum.
        results: The parts that this rank has in the end; all if not given.
    """

    def __init__(
        self,
        rounds: Rounds,
        rank: int,
        num_terms: int = 1,
        root: int | None = None,
        results: Sequence[int] | None = None,
    ) -> None:
        self.num_parts = rounds.num_parts
        self.results = range(rounds.num_parts) if results is None else results
        self.num_terms = 1 if root is not None else num_terms * rounds.num_ranks
        self.turns = turns_of(rounds, rank, num_terms, root)
        own = rank * num_terms if root is None else 0
        is_empty = root not in (None, rank)
        self.own = [] if is_empty else [(own + i, own + i + 1) for i in range(num_terms)]
        self.rooms: list[Tensor] = []

    def run(
        self,
        collective: Collective,
        op: ReduceOp,
        pieces: Iterable[Sequence[Tensor]],
        count: int | None = None,
        output: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Reduces one piece after the other into its first term, and yields the term then.

        Args:
            pieces: The flat terms of each piece, which may be made while others are under way.
            output: Where the result goes, if there is one piece; the first term if not given.
        """
        under_way: list[deque[Piece]] = [deque() for _ in self.turns]

        def go_on(step: int, most: int) -> Iterator[Tensor]:
            while len(under_way[step]) > most:
                piece = under_way[step].popleft()
                piece.end()
                if step + 1 == len(self.turns):
                    yield piece.finish()
                    continue
                piece.begin(self.turns[step + 1])
                under_way[step + 1].append(piece)
                yield from go_on(step + 1, _IN_FLIGHT)

        for terms in pieces:
            yield from go_on(0, _IN_FLIGHT - 1)
            piece = Piece(self, collective, op, terms, count, output)
            piece.begin(self.turns[0])
            under_way[0].append(piece)
        for step in range(len(self.turns)):
            yield from go_on(step, 0)

    def run_all(self, *args: Any) -> None:
        """Does what `run` does, for callers that need no piece before the end."""
        deque(self.run(*args), maxlen=0)

    def room(self, num_bytes: int) -> Tensor:
        """Returns memory. Fresh memory would cost as much as what is received into it."""
        for number, room in enumerate(self.rooms):
            if len(room) >= num_bytes:
                return self.rooms.pop(number)
        return torch.empty(num_bytes, dtype=torch.uint8)


class Piece:
    """A piece of the tensors on its way through the rounds, and the sums that are made of it.

    Args:
        collective: Sends and receives, or notes what is to be sent and received.
        do: Called with a function that writes into tensors, and its arguments.
    """

    def __init__(
        self,
        executor: Executor,
        collective: Any,
        op: ReduceOp,
        terms: Sequence[Tensor],
        count: int | None,
        output: Tensor | None,
        do: Callable[..., Any] = lambda function, *args: function(*args),
    ) -> None:
        length, num_parts = len(terms[0]), executor.num_parts
        self._executor, self._collective, self._do = executor, collective, do
        self._op, self._count, self._is_mean = undivided(op), count, op is ReduceOp.MEAN
        self._output = terms[0] if output is None else output
        self._wide = wide_dtype(self._output.dtype)
        self._all = (0, executor.num_terms)
        self._slices = [slice_of(part, num_parts, length) for part in range(num_parts)]
        # The sums that this rank has, by part.
        self._held: list[dict[Node, Tensor]] = [
            {node: term[cut] for node, term in zip(executor.own, terms, strict=False)}
            for cut in self._slices
        ]
        self._sent: list[Any] = []
        self._received: list[Received] = []
        self._coming: list[tuple[int, Node, Tensor]] = []
        self._rooms: list[Tensor] = []

    def begin(self, turn: Turn) -> None:
        """Begins to send and to receive what belongs to a round."""
        receivers, senders = turn.peers
        rooms: dict[int, list[Tensor]] = {peer: [] for peer in senders}
        self._coming = []
        for (peer, part, node), room in zip(turn.receives, self._rooms_for(turn), strict=True):
            rooms[peer].append(room)
            self._coming.append((part, node, room))
        given: dict[int, list[Tensor]] = {peer: [] for peer in receivers}
        for peer, part, node in turn.sends:
            given[peer].append(self._value(part, node))
        self._received = [self._collective.receive(*one) for one in rooms.items()]
        self._sent = [one for pair in given.items() for one in self._collective.send(*pair)]
        self._collective.meet(self._received)

    def end(self) -> None:
        """Waits for the messages of the round."""
        self._collective.finish(self._sent, self._received)
        for part, node, room in self._coming:
            self._held[part][node] = room

    def finish(self) -> Tensor:
        """Returns the result."""
        for part in self._executor.results:
            self._value(part, self._all)
        # Kept for the next piece.
        self._executor.rooms = (self._executor.rooms + self._rooms)[-2 * _IN_FLIGHT :]
        return self._output

    def _rooms_for(self, turn: Turn) -> list[Tensor]:
        """Makes rooms for what is received: results where they belong, the rest together."""
        nodes = [(part, node) for _, part, node in turn.receives]
        sizes = [0 if node == self._all else self._num_bytes(part, node) for part, node in nodes]
        # Each begins at a whole number.
        rounded = [-(-size // 16) * 16 for size in sizes]
        raw = torch.empty(0, dtype=torch.uint8)
        if total := sum(rounded):
            raw = self._executor.room(total)
            self._rooms.append(raw)
        return [
            self._output[self._slices[part]]
            if node == self._all
            else room[:size].view(self._dtype(node))
            for (part, node), size, room in zip(
                nodes, sizes, raw[:total].split(rounded), strict=True
            )
        ]

    def _dtype(self, node: Node) -> torch.dtype:
        """Returns what a node travels as: a sum is wide until it is whole."""
        is_raw = node[1] - node[0] == 1 or node == self._all
        return self._output.dtype if is_raw else self._wide

    def _num_bytes(self, part: int, node: Node) -> int:
        length: int = self._slices[part].stop - self._slices[part].start
        return length * self._dtype(node).itemsize

    def _value(self, part: int, node: Node) -> Tensor:
        """Returns the sum of the terms of a node, which is worked out if it is not there."""
        held = self._held[part]
        if node not in held:
            start, stop = node
            leaves = [(one, one + 1) for one in range(start, stop)]
            inner = [held[leaf] for leaf in leaves if leaf in held]
            is_whole = len(inner) == len(leaves)
            if node == self._all:
                held[node] = self._output[self._slices[part]]
                self._combine_all(inner if is_whole else None, part, held[node])
            else:
                terms = inner if is_whole else [self._value(part, one) for one in children(node)]
                held[node] = torch.empty(len(terms[0]), dtype=self._wide)
                self._do(combine_into, self._op, self._widened(terms), [held[node]], None)
        return held[node]

    def _combine_all(self, terms: list[Tensor] | None, part: int, output: Tensor) -> None:
        if terms is not None:
            op = ReduceOp.MEAN if self._is_mean else self._op
            self._do(combine_into, op, terms, [output], self._count)
            return
        halves = self._widened([self._value(part, one) for one in children(self._all)])
        total = torch.empty_like(halves[0])
        self._do(combine_into, self._op, halves, [total], None)
        if self._is_mean:
            self._do(_divide_into, total, self._count or self._all[1], output)
        else:
            self._do(Tensor.copy_, output, total)

    def _widened(self, terms: Sequence[Tensor]) -> list[Tensor]:
        wide = []
        for term in terms:
            wide.append(
                term if term.dtype == self._wide else torch.empty(len(term), dtype=self._wide)
            )
            if wide[-1] is not term:
                self._do(Tensor.copy_, wide[-1], term)
        return wide


def _divide_into(total: Tensor, count: int, output: Tensor) -> None:
    output.copy_(divide(total, count, output.dtype))
