"""All-reduce between pairs at distances 1, 2, 4, ...: few steps for many ranks.

doubling    ranks swap all of their sums: right for small tensors
halving     neighbors swap halves, then pairs at distance 2 quarters, ...; and back with the sums

            steps          bytes from each rank, for P a power of two
doubling    log2 P         log2 P times the tensor
halving     2 log2 P       2 (P - 1) / P of the tensor

For other numbers of ranks, doubling lets each rank send all it has to the rank 1, 2, 4, ... further
on, in log2 P steps, rounded up. What such a rank holds is no branch of the tree of the sum, so it
sends several sums in a step. Halving lets ranks beyond the largest power of two give their terms to
one below it first, and get the result last, which takes two steps more.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from unisono.algorithms.rounds import (
    Parts,
    Round,
    Rounds,
    Send,
    at,
    pairwise_sum,
    the_only_part,
)

_ALL = Fraction(1)


def doubling(num_ranks: int) -> Rounds:
    """Lets ranks exchange what they have, at twice the distance each time."""
    levels = (num_ranks - 1).bit_length()
    if num_ranks == 1 << levels:
        rounds = [
            Round(_swap(num_ranks, 1 << level, _ALL), pairwise_sum(_ALL)) for level in range(levels)
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


def halving(num_ranks: int) -> Rounds:
    """Lets pairs share the sum of half as much each time, and gather the sums back."""
    core = 1 << (num_ranks.bit_length() - 1)
    # The largest parts go to the nearest ranks, which are often on the same host.
    shares = {1 << level: Fraction(1, 2 << level) for level in range(core.bit_length() - 1)}
    out = [
        Round(_swap(core, distance, share, partial(_half_of_receiver, core, distance)), 3 * share)
        for distance, share in shares.items()
    ]
    back = [
        Round(_swap(core, distance, share, partial(_half_of_sender, core, distance)))
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


def _swap(
    core: int, distance: int, share: Fraction, parts: Parts = the_only_part
) -> tuple[Send, ...]:
    lower = tuple(rank for rank in range(core) if not rank & distance)
    upper = tuple(rank + distance for rank in lower)
    return Send(lower, at(distance), share, parts), Send(upper, at(-distance), share, parts)
