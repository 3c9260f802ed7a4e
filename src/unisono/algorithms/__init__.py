"""Who sends what to whom, as data, and what it comes to on given devices."""

from unisono.algorithms.execution import run
from unisono.algorithms.one_device import one_device
from unisono.algorithms.plan import Combine, Copy, Plan, Step, make_plan
from unisono.algorithms.schedule import Gather, Schedule, Spread, num_steps, num_transfers
from unisono.algorithms.two_level import two_level

__all__ = [
    "Combine",
    "Copy",
    "Gather",
    "Plan",
    "Schedule",
    "Spread",
    "Step",
    "make_plan",
    "num_steps",
    "num_transfers",
    "one_device",
    "run",
    "two_level",
]
