"""All-reduce between pairs at distances 1, 2, 4, ...: few steps for many ranks.

doubling    pairs swap all of their sums: right for small tensors
halving     neighbours swap halves, then pairs at distance 2 quarters, ...; and back with the sums

            steps          bytes from each rank, for P a power of two
doubling    log2 P         log2 P times the tensor
halving     2 log2 P       2 (P - 1) / P of the tensor

Ranks beyond the largest power of two give their terms to one below it first, and get the result
last, which takes two steps more.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from unisono.algorithms.rounds import Round, Rounds, Send, at, pairwise_sum

_ALL = Fraction(1)


def doubling(num_ranks: int) -> Rounds:
    """Lets pairs swap what they have, at twice the distance each time."""

    def middle(core: int) -> list[Round]:
        return [
            Round(_swap(core, 1 << level, _ALL), pairwise_sum(_ALL))
            for level in range(core.bit_length() - 1)
        ]

    return _folded(num_ranks, middle)


def halving(num_ranks: int) -> Rounds:
    """Lets pairs share the sum of half as much each time, and gather the sums back."""

    def middle(core: int) -> list[Round]:
        # The largest parts go to the nearest ranks, which are often on the same host.
        shares = {1 << i: Fraction(1, 2 << i) for i in range(core.bit_length() - 1)}
        swaps = {distance: _swap(core, distance, share) for distance, share in shares.items()}
        out = [Round(swaps[distance], pairwise_sum(shares[distance])) for distance in shares]
        return out + [Round(swaps[distance]) for distance in reversed(shares)]

    return _folded(num_ranks, middle)


def _folded(num_ranks: int, middle: Callable[[int], list[Round]]) -> Rounds:
    """Puts the steps of ranks that have no pair around those of a power of two."""
    core = 1 << (num_ranks.bit_length() - 1)
    rounds = middle(core)
    if num_ranks > core:
        give = Send(range(core, num_ranks), at(-core), _ALL)
        take = Send(range(num_ranks - core), at(core), _ALL)
        rounds = [Round((give,), pairwise_sum(_ALL)), *rounds, Round((take,))]
    return Rounds(num_ranks, tuple(rounds))


def _swap(core: int, distance: int, share: Fraction) -> tuple[Send, ...]:
    lower = tuple(rank for rank in range(core) if not rank & distance)
    upper = tuple(rank + distance for rank in lower)
    return Send(lower, at(distance), share), Send(upper, at(-distance), share)
