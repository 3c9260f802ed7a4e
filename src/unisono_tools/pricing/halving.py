"""All-reduce between pairs: neighbors swap halves, then pairs at distance 2 quarters, and back.

            steps          bytes from each rank, for P a power of two
halving     2 log2 P       2 (P - 1) / P of the tensor

Ranks beyond the largest power of two give their terms to one below it first, and get the result
last, which takes two steps more.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from unisono.algorithms.rounds import Round, Rounds, Send, at, pairwise_sum, swap

_ALL = Fraction(1)


def halving(num_ranks: int) -> Rounds:
    """Lets pairs share the sum of half as much each time, and gather the sums back."""
    core = 1 << (num_ranks.bit_length() - 1)
    # The largest parts go to the nearest ranks, which are often on the same host.
    shares = {1 << level: Fraction(1, 2 << level) for level in range(core.bit_length() - 1)}
    out = [
        Round(swap(core, distance, share, partial(_half_of_receiver, core, distance)), 3 * share)
        for distance, share in shares.items()
    ]
    back = [
        Round(swap(core, distance, share, partial(_half_of_sender, core, distance)))
        for distance, share in reversed(shares.items())
    ]
    rounds = [*out, *back]
    if num_ranks > core:
        give = Send(range(core, num_ranks), at(-core), _ALL, partial(_every_part, core))
        take = Send(range(num_ranks - core), at(core), _ALL, partial(_every_part, core))
        rounds = [Round((give,), pairwise_sum(_ALL)), *rounds, Round((take,))]
    return Rounds(num_ranks, tuple(rounds), num_parts=core)


def _half_of_receiver(core: int, distance: int, _: int, receiver: int, *__: int) -> range:
    """Of the parts that both have, those whose number ends as that of the receiver, in binary."""
    return range(receiver % (2 * distance), core, 2 * distance)


def _half_of_sender(core: int, distance: int, sender: int, *_: int) -> range:
    return range(sender % (2 * distance), core, 2 * distance)


def _every_part(core: int, *_: int) -> range:
    return range(core)
