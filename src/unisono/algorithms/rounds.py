"""What ranks send each other, round by round: an algorithm between workers as data.

All messages of a round are sent at the same time. The next round begins when they have arrived.
Ranks are counted from 0 to `num_ranks` - 1 and in a circle: the rank after the last is 0.

    Send(senders, offsets, share, parts)   each sender sends what it holds of some parts of the
                                           tensor so many ranks further; it is `share` of the tensor
    Round(sends, combined, times)          such sends at once, and the sum of what came; so many
                                           times

Equal rounds are stored once, so 4096 ranks take no more memory than four. The cost model prices
rounds, and `unisono.algorithms.messages` says what each rank sends when it runs them.
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
