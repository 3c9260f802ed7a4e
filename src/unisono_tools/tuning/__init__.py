"""Measures links, and finds the constants of the cost model that explain the measured times."""

from unisono_tools.tuning.measured import (
    Measured,
    errors_between,
    fitted,
    predicted_seconds,
    runs_of,
)
from unisono_tools.tuning.rank_sweeps import cluster_sweep, leave, local_rank_sweeps, rank_sweeps
from unisono_tools.tuning.sweeps import local_sweep

__all__ = [
    "Measured",
    "cluster_sweep",
    "errors_between",
    "fitted",
    "leave",
    "local_rank_sweeps",
    "local_sweep",
    "predicted_seconds",
    "rank_sweeps",
    "runs_of",
]
