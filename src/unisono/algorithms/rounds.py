"""What ranks send each other, round by round: an algorithm between workers as data.

All messages of a round are sent at the same time. The next round begins when they have arrived.
Ranks are counted from 0 to `num_ranks` - 1 and in a circle: the rank after the last is 0.

    Send(senders, offsets, share, parts)   each sender sends what it holds of some parts of the
                                           tensor so many ranks further; it is `share` of the tensor
    Round(sends, combined, times)          such sends at once, and the sum of what came; so many
                                           times

Equal rounds are stored once, so 4096 ranks take no more memory than four. The cost model prices
rounds, and `turns_of` says what each rank sends when it runs them. A rank holds sums of some terms
of each part. Every sum is a node of the one tree that orders all sums (`unisono.kernels.tree`): the
range of the terms in it. A rank sends all that it holds of a part, merged into as few nodes as
possible. So every algorithm gives the same bits, and it is over when all ranks hold the node of all
terms.

Workers run three algorithms:

    exchange    parts to their ranks, each of which adds up its own, and the sums back to all
    one step    all of it to everybody, and everybody adds up all: for small tensors
    doubling    between pairs at distances 1, 2, 4, ...: few steps for many ranks

                steps   bytes from each rank
    exchange    2       2 (P - 1) / P of the tensor
    one step    1       (P - 1) of the tensor
    doubling    log2 P  log2 P times the tensor, for P a power of two
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from unisono.algorithms.nodes import Node, merged

# Given a sender, a receiver, how often the round was run before and the number of ranks: the parts
# that are sent.
Parts: TypeAlias = Callable[[int, int, int, int], range]


def the_only_part(sender: int, receiver: int, turn: int, num_ranks: int) -> range:
    """For algorithms that do not divide the tensor."""
    return range(1)


def part_of_receiver(sender: int, receiver: int, turn: int, num_ranks: int) -> range:
    """For algorithms in which each rank adds up one part."""
    return range(receiver, receiver + 1)


def part_of_sender(sender: int, receiver: int, turn: int, num_ranks: int) -> range:
    """For algorithms in which each rank has the result of one part."""
    return range(sender, sender + 1)


class Send(NamedTuple):
    """Each of `senders` sends `share` of the tensor to each of the ranks `offsets` further on."""

    senders: tuple[int, ...] | range
    offsets: range
    share: Fraction
    parts: Parts = the_only_part


class Round(NamedTuple):
    """Messages that are sent at the same time.

    Attributes:
        combined: How much a rank then reads and writes for its sum, as a share of the tensor.
        times: How many such rounds follow each other.
    """

    sends: tuple[Send, ...]
    combined: Fraction = Fraction(0)
    times: int = 1


@dataclass(frozen=True)
class Rounds:
    """An algorithm among `num_ranks` ranks."""

    num_ranks: int
    rounds: tuple[Round, ...]
    num_parts: int = 1


def at(offset: int) -> range:
    """Returns the one offset as `Send` takes it."""
    return range(offset, offset + 1)


def pairwise_sum(share: Fraction) -> Fraction:
    """Returns how much is read and written to add `share` of two tensors."""
    return 3 * share


def exchange(num_ranks: int) -> Rounds:
    """Sends every rank its part of all terms, and gathers the sums of all parts."""
    if num_ranks == 1:
        return Rounds(1, ())
    part = Fraction(1, num_ranks)
    gather = Send(range(num_ranks), range(1, num_ranks), part, part_of_receiver)
    spread = Send(range(num_ranks), range(1, num_ranks), part, part_of_sender)
    return Rounds(
        num_ranks,
        (Round((gather,), (num_ranks + 1) * part), Round((spread,))),
        num_parts=num_ranks,
    )


def one_step(num_ranks: int) -> Rounds:
    """Sends all terms to all ranks."""
    if num_ranks == 1:
        return Rounds(1, ())
    send = Send(range(num_ranks), range(1, num_ranks), Fraction(1))
    return Rounds(num_ranks, (Round((send,), Fraction(num_ranks + 1)),))


_ALL = Fraction(1)


def doubling(num_ranks: int) -> Rounds:
    """Lets ranks exchange what they have, at twice the distance each time.

    If their number is no power of two, each rank sends all it has to the rank 1, 2, 4, ... further
    on, in log2 P steps, rounded up. What it holds is no branch of the tree of the sum, so it sends
    several sums.
    """
    levels = (num_ranks - 1).bit_length()
    if num_ranks == 1 << levels:
        rounds = [
            Round(swap(num_ranks, 1 << level, _ALL), pairwise_sum(_ALL)) for level in range(levels)
        ]
    else:
        rounds = [
            Round(
                (Send(range(num_ranks), at(1 << level), Fraction(max(level + 1, 2 * level - 1))),),
                pairwise_sum(_ALL),
            )
            for level in range(levels)
        ]
    return Rounds(num_ranks, tuple(rounds))


def swap(
    core: int, distance: int, share: Fraction, parts: Parts = the_only_part
) -> tuple[Send, ...]:
    """Lets the ranks below `core` swap `share` of the tensor in pairs at `distance`."""
    lower = tuple(rank for rank in range(core) if not rank & distance)
    upper = tuple(rank + distance for rank in lower)
    return Send(lower, at(distance), share, parts), Send(upper, at(-distance), share, parts)


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
    """Returns what `rank` does, round by round. In a broadcast, only `root` has a term."""
    run = _Run(rounds, num_terms, root)
    return tuple(run.turn(rank, step) for step in range(len(run.steps)))


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
        sends, turn = self.steps[step]
        size = self.rounds.num_ranks
        targets = [
            (peer, send.parts(rank, peer, turn, size))
            for send in sends
            if rank in send.senders
            for peer in ((rank + offset) % size for offset in send.offsets)
        ]
        sources = list(self._senders(rank, step))
        return Turn(
            (tuple(peer for peer, _ in targets), tuple(peer for peer, _ in sources)),
            tuple(
                message
                for peer, parts in targets
                for message in self._sent(peer, rank, peer, parts, step)
            ),
            tuple(
                message
                for peer, parts in sources
                for message in self._sent(peer, peer, rank, parts, step)
            ),
        )

    def _sent(
        self, peer: int, sender: int, receiver: int, parts: range, step: int
    ) -> Iterator[Message]:
        """Yields what the sender has of some parts and the receiver lacks."""
        for part in parts:
            there = self.held(receiver, part, step)
            for start, stop in self.held(sender, part, step):
                if not any(first <= start and stop <= last for first, last in there):
                    yield Message(peer, part, (start, stop))

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

    def _senders(self, rank: int, step: int) -> Iterator[tuple[int, range]]:
        sends, turn = self.steps[step]
        size = self.rounds.num_ranks
        for send in sends:
            for peer in ((rank - offset) % size for offset in send.offsets):
                if peer in send.senders:
                    yield peer, send.parts(peer, rank, turn, size)
