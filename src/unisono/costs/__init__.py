"""What algorithms cost: constants, what they come to, and the file that keeps them."""

from unisono.costs.between_workers import (
    STEP_BYTES,
    algorithms_for,
    first_bytes_for_parts,
    hierarchical_for,
    one_step_pays,
    phases_of,
    step_bytes,
)
from unisono.costs.links import Cluster, Line, Link
from unisono.costs.packs import BYTES_PER_PACK, best_bytes_per_pack
from unisono.costs.rounds import Phase, busiest_share, line_of, num_steps, seconds_of
from unisono.costs.schedules import schedule_line, schedule_seconds
from unisono.costs.tuning import Tuning, current_tuning, read_tuning, tuning_path

__all__ = [
    "BYTES_PER_PACK",
    "STEP_BYTES",
    "Cluster",
    "Line",
    "Link",
    "Phase",
    "Tuning",
    "algorithms_for",
    "best_bytes_per_pack",
    "busiest_share",
    "current_tuning",
    "first_bytes_for_parts",
    "hierarchical_for",
    "line_of",
    "num_steps",
    "one_step_pays",
    "phases_of",
    "read_tuning",
    "schedule_line",
    "schedule_seconds",
    "seconds_of",
    "step_bytes",
    "tuning_path",
]
