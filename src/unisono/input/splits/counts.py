"""How many samples the replicas got, read from the arguments of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unisono.errors import UnsupportedError
from unisono.input.splits.layout import lay_out
from unisono.values import PerReplica, flatten


def counts_of(structure: Any) -> tuple[int, ...] | None:
    """Returns how many samples each replica got, or None where that is not known.

    Input says so itself, for the replicas of all workers, and so does what an earlier run with an
    uneven batch has returned. Other values are measured, which gives the samples of this worker; a
    structure without a `PerReplica` counts as that of the only replica.

    Raises:
        UnsupportedError: If there are batches that were split in different proportions.
    """
    leaves = _leaves(structure)
    distributed = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
    for is_input in True, False:
        told = [one.counts for one in distributed if one.is_input is is_input and one.counts]
        if told:
            return _agreed(told)
    parts = [leaf.values for leaf in distributed] or [(leaf,) for leaf in leaves]
    found = {counts for components in parts if (counts := _measured(components)) is not None}
    return found.pop() if len(found) == 1 else None


def _agreed(told: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    first = told[0]
    for other in told:
        if other is not first and _proportions(other) != _proportions(first):
            raise UnsupportedError(
                "`run()` was given batches that were split in different proportions: the replicas "
                f"got {first} samples of one batch and {other} of another, so the weight of each "
                "replica's loss is not known. Use batches of the same size in one step, for "
                "example with `drop_last=True`."
            )
    return first


def _proportions(counts: tuple[int, ...]) -> tuple[int, ...]:
    unit = math.gcd(*counts) or 1
    return tuple(count // unit for count in counts)


def _leaves(structure: Any) -> list[Any]:
    if type(structure) is tuple and all(type(one) in (PerReplica, Tensor) for one in structure):
        return list(structure)
    return flatten(structure)[0]


def _measured(components: Sequence[Any]) -> tuple[int, ...] | None:
    sizes: list[int] = []
    for component in components:
        if type(component) is Tensor and component.dim() > 0:
            sizes.append(component.size(0))
            continue
        layout = lay_out(component)
        # A column that ran out of entries holds nothing.
        num_samples = layout.num_samples if layout.leaves else 0
        if num_samples is None:
            return None
        sizes.append(num_samples)
    return tuple(sizes)
