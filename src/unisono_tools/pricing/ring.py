"""All-reduce around a ring: sums of parts go round once, and the results once more.

0 -> 1 -> 2 -> 3 -> 0      each rank passes one part on to the next in every round

steps   2 (P - 1)
bytes   2 (P - 1) / P of the tensor from each rank
"""

from __future__ import annotations

from fractions import Fraction

from unisono.algorithms.rounds import Round, Rounds, Send, at, pairwise_sum


def ring(num_ranks: int) -> Rounds:
    """Passes each part on to the next rank, first to add it up, then to spread it."""
    if num_ranks == 1:
        return Rounds(1, ())
    part = Fraction(1, num_ranks)
    gather = Send(range(num_ranks), at(1), part, _gathered)
    spread = Send(range(num_ranks), at(1), part, _spread)
    return Rounds(
        num_ranks,
        (
            Round((gather,), pairwise_sum(part), times=num_ranks - 1),
            Round((spread,), times=num_ranks - 1),
        ),
        num_parts=num_ranks,
    )


def _gathered(sender: int, receiver: int, turn: int, num_ranks: int) -> range:
    return at((sender - turn - 1) % num_ranks)


def _spread(sender: int, receiver: int, turn: int, num_ranks: int) -> range:
    return at((sender - turn) % num_ranks)
