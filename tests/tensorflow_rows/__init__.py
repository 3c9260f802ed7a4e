"""A check for every row of the tables in `docs/coming_from_tensorflow.md`."""

from tensorflow_rows import behavior, differences, older_names, other_versions, reductions
from tensorflow_rows.table import checks, made

__all__ = [
    "behavior",
    "checks",
    "differences",
    "made",
    "older_names",
    "other_versions",
    "reductions",
]
