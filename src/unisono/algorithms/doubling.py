"""All-reduce between pairs at distances 1, 2, 4, ...: few steps for many ranks.

            steps          bytes from each rank, for P a power of two
doubling    log2 P         log2 P times the tensor

For other numbers of ranks, each rank sends all it has to the rank 1, 2, 4, ... further on, in log2
P steps, rounded up. What it holds is no branch of the tree of the sum, so it sends several sums.
"""

from __future__ import annotations

from fractions import Fraction

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
