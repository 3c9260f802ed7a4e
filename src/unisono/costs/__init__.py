"""The cost of algorithms: constants of links, predicted times, and the tuning file."""

from unisono.costs.model import (
    SMALL_BYTES,
    USUAL_LINK,
    Cluster,
    Link,
    by_host,
    cost_line,
    fastest_flat,
    first_bytes_for_parts,
    rounds_of,
    schedule_line,
)
from unisono.costs.tuning import Run, Tuning, current_tuning, read_tuning
from unisono.packing import BYTES_PER_PACK, Line, best_bytes_per_pack
from unisono.system import tuning_path

__all__ = [
    "BYTES_PER_PACK",
    "SMALL_BYTES",
    "USUAL_LINK",
    "Cluster",
    "Line",
    "Link",
    "Run",
    "Tuning",
    "best_bytes_per_pack",
    "by_host",
    "cost_line",
    "current_tuning",
    "fastest_flat",
    "first_bytes_for_parts",
    "read_tuning",
    "rounds_of",
    "schedule_line",
    "tuning_path",
]
