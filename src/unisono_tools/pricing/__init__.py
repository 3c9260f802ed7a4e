"""Prices algorithms between workers on given links, also those that Unisono does not run."""

from unisono_tools.pricing.phases import algorithms_for, phases_of, running
from unisono_tools.pricing.rounds import Phase, busiest_share, line_of, num_steps, seconds_of

__all__ = [
    "Phase",
    "algorithms_for",
    "busiest_share",
    "line_of",
    "num_steps",
    "phases_of",
    "running",
    "seconds_of",
]
