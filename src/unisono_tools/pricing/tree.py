"""All-reduce along the tree of the sum: neighbors become one, up to rank 0, and back down.

0 <- 1   2 <- 3   4 <- 5   6      first round up
0 <----- 2        4 <----- 6      second
0 <-------------- 4               third; the way down is the same, the other way round

steps   2 log2 P, rounded up
bytes   all of the tensor in each
"""

from __future__ import annotations

from fractions import Fraction

from unisono.algorithms.rounds import Round, Rounds, Send, at, pairwise_sum

_ALL = Fraction(1)


def tree(num_ranks: int) -> Rounds:
    """Adds up neighbors, level by level, and sends the result back the same way."""
    widths = [1 << level for level in range((num_ranks - 1).bit_length())]
    up = [
        Round((Send(range(w, num_ranks, 2 * w), at(-w), _ALL),), pairwise_sum(_ALL)) for w in widths
    ]
    down = [Round((Send(range(0, num_ranks - w, 2 * w), at(w), _ALL),)) for w in reversed(widths)]
    return Rounds(num_ranks, (*up, *down))
