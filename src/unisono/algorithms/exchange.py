"""All-reduce in which all ranks send to all: what Unisono does between workers.

exchange    parts to their ranks, each of which adds up its own, and the sums back to all
one step    all of it to everybody, and everybody adds up all: for small tensors

            steps   bytes from each rank
exchange    2       2 (P - 1) / P of the tensor
one step    1       (P - 1) of the tensor
"""

from __future__ import annotations

from fractions import Fraction

from unisono.algorithms.rounds import Round, Rounds, Send, part_of_receiver, part_of_sender


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
