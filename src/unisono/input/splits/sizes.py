"""Which samples of a batch go to which replica: W workers, of which this is w, with R replicas.

even        a batch of n becomes W R parts whose sizes differ by at most one, the larger ones first;
            worker w keeps the parts w R to w R + R - 1, which the same replicas would get if one
            worker had them all
tensorflow  the same with TensorFlow's sizes: ceil(n / (W R)), the later ones shorter or empty
fixed       a batch of a worker's own becomes W R parts, which last for W steps
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable


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
