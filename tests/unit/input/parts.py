"""What tests read from the input of a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def own_samples(value: Any, rank: int = 0) -> list[Any]:
    """Returns the samples of each replica of a worker, without those that count nothing."""
    parts = [part.tolist() if isinstance(part, Tensor) else part for part in value.values]
    if value.counts is None:
        return parts
    counts = value.counts[rank * len(parts) : (rank + 1) * len(parts)]
    return [part if count else [] for part, count in zip(parts, counts, strict=True)]
