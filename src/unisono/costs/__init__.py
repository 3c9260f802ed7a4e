"""The cost of algorithms: constants of links, predicted times, and the tuning file."""

from unisono.costs.between_workers import (
    SMALL_BYTES,
    USUAL_LINK,
    algorithms_for,
    fastest_flat,
    first_bytes_for_parts,
    hierarchical_for,
    phases_of,
    rounds_of,
    running,
)
from unisono.costs.links import Cluster, Line, Link
from unisono.costs.packs import BYTES_PER_PACK, best_bytes_per_pack
from unisono.costs.rounds import Phase, busiest_share, line_of, num_steps, seconds_of
from unisono.costs.schedules import schedule_line, schedule_seconds
from unisono.costs.tuning import Run, Tuning, current_tuning, read_tuning, tuning_path

__all__ = [
    "BYTES_PER_PACK",
    "SMALL_BYTES",
    "USUAL_LINK",
    "Cluster",
    "Line",
    "Link",
    "Phase",
    "Run",
    "Tuning",
    "algorithms_for",
    "best_bytes_per_pack",
    "busiest_share",
    "current_tuning",
    "fastest_flat",
    "first_bytes_for_parts",
    "hierarchical_for",
    "line_of",
    "num_steps",
    "phases_of",
    "read_tuning",
    "rounds_of",
    "running",
    "schedule_line",
    "schedule_seconds",
    "seconds_of",
    "tuning_path",
]
