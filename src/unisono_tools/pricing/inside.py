"""What the ranks of a host do before and after an all-reduce between hosts."""

from __future__ import annotations

from fractions import Fraction

from unisono.algorithms.rounds import Round, Rounds, Send, at


def all_gather(num_ranks: int) -> Rounds:
    """Sends the part of each rank to all ranks."""
    if num_ranks == 1:
        return Rounds(1, ())
    send = Send(range(num_ranks), range(1, num_ranks), Fraction(1, num_ranks))
    return Rounds(num_ranks, (Round((send,)),))


def spread(num_ranks: int) -> Rounds:
    """Sends everything from the first rank to all ranks."""
    if num_ranks == 1:
        return Rounds(1, ())
    return Rounds(num_ranks, (Round((Send((0,), range(1, num_ranks), Fraction(1)),)),))


def gather(num_ranks: int) -> Rounds:
    """Sends everything from all ranks to the first rank."""
    if num_ranks == 1:
        return Rounds(1, ())
    sends = tuple(Send((rank,), at(-rank), Fraction(1)) for rank in range(1, num_ranks))
    return Rounds(num_ranks, (Round(sends),))
