"""Reduction through one device: everything is sent to it, and from there to every destination.

transfers   (P - 1) in, (D - 1) out, all of them through the root
steps       2
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.algorithms.schedule import Gather, Schedule, Spread, without


def one_device(num_replicas: int, *, root: int = 0, destinations: Sequence[int]) -> Schedule:
    """Gathers the replicas' values on `root` and spreads the result to `destinations`."""
    return (
        Gather(root, without(range(num_replicas), root)),
        Spread(root, without(destinations, root)),
    )
