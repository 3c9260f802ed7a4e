"""Algorithms as data: who sends what to whom, their plans, and the code that runs them.

Those between workers are in `unisono.algorithms.rounds`.
"""

from unisono.algorithms.schedule import (
    Combine,
    Copy,
    Gather,
    Plan,
    Schedule,
    Spread,
    make_plan,
    num_steps,
    num_transfers,
    one_device,
    run,
    two_level,
)

__all__ = [
    "Combine",
    "Copy",
    "Gather",
    "Plan",
    "Schedule",
    "Spread",
    "make_plan",
    "num_steps",
    "num_transfers",
    "one_device",
    "run",
    "two_level",
]
