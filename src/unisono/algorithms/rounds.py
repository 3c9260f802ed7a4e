"""What ranks send each other, round by round: an algorithm between workers as data.

All messages of a round are sent at the same time. The next round begins when they have arrived.
Ranks are counted from 0 to `num_ranks` - 1 and in a circle: the rank after the last is 0.

    Send(senders, offsets, share, parts)   each sender sends what it holds of some parts of the
                                           tensor so many ranks further; it is `share` of the tensor
    Round(sends, combined, times)          such sends at once, and the sum of what came; so many
                                           times

Equal rounds are stored once, so 4096 ranks take no more memory than four. The cost model prices
rounds, and `unisono.algorithms.messages` says what each rank sends when it runs them.

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

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeAlias

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
    """Each of `senders` sends `share` of the tensor to the ranks `offsets` further on.

    Attributes:
        offsets: How much further on the receivers are.
        share: How much each receiver gets.
    """

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

    @property
    def num_steps(self) -> int:
        """How many rounds follow each other."""
        return sum(one.times for one in self.rounds)

    @property
    def sent_share(self) -> Fraction:
        """What the busiest rank of each round sends, summed over all rounds."""
        return sum((one.times * _most_sent(one) for one in self.rounds), Fraction(0))


def at(offset: int) -> range:
    """Returns the one offset as `Send` takes it."""
    return range(offset, offset + 1)


def pairwise_sum(share: Fraction) -> Fraction:
    """Returns how much is read and written to add `share` of two tensors."""
    return 3 * share


def _most_sent(one: Round) -> Fraction:
    sent: dict[int, Fraction] = {}
    for send in one.sends:
        for rank in send.senders:
            sent[rank] = sent.get(rank, Fraction(0)) + len(send.offsets) * send.share
    return max(sent.values(), default=Fraction(0))


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
