"""The messages of one rank in an algorithm.

A rank holds sums of some terms of each part. Every sum is a node of the one tree that orders all
sums (see `unisono.kernels.tree`): the range of the terms in it. A rank sends all that it holds of a
part, merged into as few nodes as possible. So every algorithm gives the same bits, and it is over
when all ranks hold the node of all terms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from unisono.algorithms.rounds import Rounds, Send

Node: TypeAlias = tuple[int, int]


class Message(NamedTuple):
    """One node of one part, from or to a peer."""

    peer: int
    part: int
    node: Node


class Turn(NamedTuple):
    """One round of one rank."""

    peers: tuple[tuple[int, ...], tuple[int, ...]]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def turns_of(
    rounds: Rounds, rank: int, num_terms: int = 1, root: int | None = None
) -> tuple[Turn, ...]:
    """Returns what `rank` does, round by round.

    Args:
        root: The only rank that has a term, for a broadcast; None for a sum.
    """
    run = _Run(rounds, num_terms, root)
    return tuple(run.turn(rank, step) for step in range(len(run.steps)))


def merged(nodes: Iterable[Node], num_terms: int) -> tuple[Node, ...]:
    """Merges nodes of the tree over `num_terms` terms into as few as possible."""
    found: list[Node] = []
    for node in sorted(nodes, key=lambda one: (one[0], -one[1])):
        if found and node[1] <= found[-1][1]:
            continue
        found.append(node)
        while len(found) > 1 and are_siblings(found[-2], found[-1], num_terms):
            right, left = found.pop(), found.pop()
            found.append((left[0], right[1]))
    return tuple(found)


def children(node: Node) -> tuple[Node, Node]:
    """Returns the two nodes whose sum is this node."""
    start, stop = node
    middle = start + (1 << ((stop - start - 1).bit_length() - 1))
    return (start, middle), (middle, stop)


def are_siblings(left: Node, right: Node, num_terms: int) -> bool:
    """Whether the sum of two nodes is a node of the tree over `num_terms` terms."""
    width = right[0] - left[0]
    is_node = width & (width - 1) == 0 and left[0] % (2 * width) == 0
    return left[1] == right[0] and is_node and right[1] == min(left[0] + 2 * width, num_terms)


@dataclass(frozen=True, eq=False)
class _Run:
    """What all ranks hold, computed on demand."""

    rounds: Rounds
    num_terms: int
    root: int | None

    @functools.cached_property
    def steps(self) -> list[tuple[tuple[Send, ...], int]]:
        return [(one.sends, turn) for one in self.rounds.rounds for turn in range(one.times)]

    @functools.cached_property
    def _total(self) -> int:
        return 1 if self.root is not None else self.rounds.num_ranks * self.num_terms

    def turn(self, rank: int, step: int) -> Turn:
        targets = list(self._receivers(rank, step))
        sources = list(self._senders(rank, step))
        return Turn(
            (tuple(peer for peer, _ in targets), tuple(peer for peer, _ in sources)),
            tuple(
                Message(peer, part, node)
                for peer, parts in targets
                for part in parts
                for node in self._sent(rank, peer, part, step)
            ),
            tuple(
                Message(peer, part, node)
                for peer, parts in sources
                for part in parts
                for node in self._sent(peer, rank, part, step)
            ),
        )

    def _sent(self, sender: int, receiver: int, part: int, step: int) -> list[Node]:
        """Returns what the sender has of a part and the receiver lacks."""
        there = self.held(receiver, part, step)
        return [
            (start, stop)
            for start, stop in self.held(sender, part, step)
            if not any(first <= start and stop <= last for first, last in there)
        ]

    @functools.cache  # noqa: B019
    def held(self, rank: int, part: int, step: int) -> tuple[Node, ...]:
        """Returns what `rank` has of a part before a step."""
        if step == 0:
            if self.root is not None:
                return ((0, 1),) if rank == self.root else ()
            own = range(rank * self.num_terms, (rank + 1) * self.num_terms)
            return merged([(one, one + 1) for one in own], self._total)
        before = self.held(rank, part, step - 1)
        come = [
            node
            for peer, parts in self._senders(rank, step - 1)
            if part in parts
            for node in self.held(peer, part, step - 1)
        ]
        return merged([*before, *come], self._total) if come else before

    def _receivers(self, rank: int, step: int) -> Iterator[tuple[int, range]]:
        sends, turn = self.steps[step]
        size = self.rounds.num_ranks
        for send in sends:
            if rank in send.senders:
                for peer in ((rank + offset) % size for offset in send.offsets):
                    yield peer, send.parts(rank, peer, turn, size)

    def _senders(self, rank: int, step: int) -> Iterator[tuple[int, range]]:
        sends, turn = self.steps[step]
        size = self.rounds.num_ranks
        for send in sends:
            for peer in ((rank - offset) % size for offset in send.offsets):
                if peer in send.senders:
                    yield peer, send.parts(peer, rank, turn, size)
