"""The all-reduces between workers: to all ranks at once, or in pairs.

exchange    parts to their ranks, each of which adds up its own, and the sums back to all
one step    all of it to everybody, and everybody adds up all: for small tensors
doubling    between pairs at distances 1, 2, 4, ...: few steps for many ranks

            steps   bytes from each rank
exchange    2       2 (P - 1) / P of the tensor
one step    1       (P - 1) of the tensor
doubling    log2 P  log2 P times the tensor, for P a power of two
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
    part_of_receiver,
    part_of_sender,
    the_only_part,
)


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
