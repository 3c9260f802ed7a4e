"""What ranks send each other, round by round: an algorithm between workers as data.

All messages of a round are under way at once; the next round begins when they have come. Ranks are
counted from 0 to `num_ranks` - 1 and in a circle: the rank after the last is 0.

    Send(senders, offsets, share)   each sender sends `share` of the tensor so many ranks further
    Round(sends, combined, times)   such sends at once, and the sum of what came; so many times

Rounds that are alike are written once, so that 4096 ranks take no more room than four.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


class Send(NamedTuple):
    """Each of `senders` sends `share` of the tensor to the ranks `offsets` further on."""

    senders: tuple[int, ...] | range
    offsets: range
    share: Fraction


class Round(NamedTuple):
    """Messages that go at once.

    Attributes:
        sends: The messages.
        combined: How much a rank then reads and writes to add up, as a share of the tensor.
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

    @property
    def num_steps(self) -> int:
        """How many rounds follow each other."""
        return sum(one.times for one in self.rounds)

    @property
    def sent_share(self) -> Fraction:
        """What the busiest rank of each round sends, all rounds together."""
        return sum((one.times * _most_sent(one) for one in self.rounds), Fraction(0))


def at(offset: int) -> range:
    """Returns the one offset as `Send` takes it."""
    return range(offset, offset + 1)


def pairwise_sum(share: Fraction) -> Fraction:
    """Returns what is read and written to add `share` of a tensor to as much of another."""
    return 3 * share


def _most_sent(one: Round) -> Fraction:
    sent: dict[int, Fraction] = {}
    for send in one.sends:
        for rank in send.senders:
            sent[rank] = sent.get(rank, Fraction(0)) + len(send.offsets) * send.share
    return max(sent.values(), default=Fraction(0))
