"""How many samples each replica gets of a batch, or has got in the arguments of a run.

There are W workers, of which this is w, with R replicas each.

even        a batch of n becomes W R parts whose sizes differ by at most one, the larger ones first;
            worker w keeps the parts w R to w R + R - 1, which the same replicas would get if one
            worker had them all
tensorflow  the same with TensorFlow's sizes: ceil(n / (W R)), the later ones shorter or empty
fixed       a batch of a worker's own becomes W R parts, which last for W steps
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from unisono.errors import UnsupportedError
from unisono.input.splits.layout import lay_out
from unisono.values import PerReplica, flatten


def even_sizes(num_samples: int, num_replicas: int) -> tuple[int, ...]:
    """Returns sizes that differ by at most one; the first replicas get the larger parts.

    >>> even_sizes(13, 4), even_sizes(4, 3), even_sizes(2, 3)
    ((4, 3, 3, 3), (2, 1, 1), (1, 1, 0))
    """
    share, num_larger = divmod(num_samples, num_replicas)
    return tuple(share + (i < num_larger) for i in range(num_replicas))


def tensorflow_sizes(num_samples: int, num_replicas: int) -> tuple[int, ...]:
    """Returns the sizes of the sub-batches: the rounded-up share until nothing is left.

    >>> tensorflow_sizes(13, 4), tensorflow_sizes(4, 3), tensorflow_sizes(5, 4)
    ((4, 4, 4, 1), (2, 2, 0), (2, 2, 1, 0))
    """
    share = -(-num_samples // num_replicas)
    return tuple(min(share, max(0, num_samples - i * share)) for i in range(num_replicas))


def rotated_sizes(batch_size: int, num_replicas: int, first: int) -> tuple[int, ...]:
    """Returns the sizes of the parts that a worker makes of its own batches.

    The larger ones come first, rotated to `first`, the first replica of the worker. So the workers
    together make every global step as large as a batch.

    >>> rotated_sizes(7, 4, 0), rotated_sizes(7, 4, 2)
    ((2, 2, 2, 1), (2, 1, 2, 2))
    """
    sizes = even_sizes(batch_size, num_replicas)
    return sizes[first:] + sizes[:first]


def filled_slices(num_samples: int, sizes: Iterable[int]) -> tuple[slice, ...]:
    """Returns the samples of parts of `sizes` that are filled in order, until nothing is left.

    >>> filled_slices(6, (4, 4))
    (slice(0, 4, None), slice(4, 6, None))
    """
    return tuple(
        slice(min(part.start, num_samples), min(part.stop, num_samples))
        for part in slices_of(sizes)
    )


def slices_of(sizes: Iterable[int]) -> tuple[slice, ...]:
    """Returns the samples of parts of `sizes`, one after another.

    >>> slices_of((2, 1))
    (slice(0, 2, None), slice(2, 3, None))
    """
    ends = itertools.accumulate(sizes, initial=0)
    return tuple(itertools.starmap(slice, itertools.pairwise(ends)))


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
