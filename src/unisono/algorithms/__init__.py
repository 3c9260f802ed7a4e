"""Algorithms as data: who sends what to whom, their plans, and the code that runs them."""

from unisono.algorithms.messages import (
    Node,
    Turn,
    are_siblings,
    children,
    merged,
    turns_of,
)
from unisono.algorithms.plan import Combine, Copy, Plan, make_plan, run
from unisono.algorithms.rounds import Round, Rounds, Send, doubling, exchange, one_step
from unisono.algorithms.schedule import (
    Gather,
    Schedule,
    Spread,
    num_steps,
    num_transfers,
    one_device,
    two_level,
)

__all__ = [
    "Combine",
    "Copy",
    "Gather",
    "Node",
    "Plan",
    "Round",
    "Rounds",
    "Schedule",
    "Send",
    "Spread",
    "Turn",
    "are_siblings",
    "children",
    "doubling",
    "exchange",
    "make_plan",
    "merged",
    "num_steps",
    "num_transfers",
    "one_device",
    "one_step",
    "run",
    "turns_of",
    "two_level",
]
