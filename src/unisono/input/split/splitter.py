"""One host batch becomes a part for each replica: views of it, along its batch dimension.

There are W workers, of which this is w, with R replicas each.

even        a batch of n becomes W R parts whose sizes differ by at most one, the larger ones first;
            worker w keeps the parts w R to w R + R - 1, which the same replicas would get if one
            worker had them all
tensorflow  the same with TensorFlow's sizes: ceil(n / (W R)), the later ones shorter or empty
fixed       a batch of a worker's own becomes W R parts, which last for W steps
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from unisono.devices import Device
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.input.options import DEFAULT_INPUT_OPTIONS, InputOptions
from unisono.input.split.layout import (
    Layout,
    is_column,
    is_inner_list,
    is_list,
    lay_out,
    taken_apart,
)
from unisono.input.split.reader import Reader
from unisono.reductions import dealt
from unisono.values import PerReplica, Tree, map_leaves

Slices: TypeAlias = Callable[[int], Sequence[slice]]

# The batch of a replica for which there is none.
MISSING: Any = object()


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
    sizes = dealt(batch_size, num_replicas)
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


@dataclass(frozen=True)
class SplitBatch:
    """The input of one step, on devices to which its copies may still be under way.

    Attributes:
        leaves: For each leaf of the tree its parts, by replica id.
        counts: How many samples each replica got: of all workers if they share the batch. A
            replica that got none has a part all the same. Empty if they are not counted.
        is_counted: Whether the counts are those of samples; otherwise each part counts as one.
        of_all: In an elastic job, for each leaf the parts of the replicas of all workers.
        generation: Which workers there were then.
        step: If its workers read for themselves, which step of the input this is.
        copies: Each GPU with the event after its copies.
    """

    tree: Tree
    leaves: list[tuple[Any, ...]]
    counts: tuple[int, ...]
    is_counted: bool = True
    of_all: list[tuple[Any, ...]] | None = None
    generation: int = 0
    step: Any = None
    copies: tuple[tuple[torch.device, torch.cuda.Event], ...] = ()

    def of(self, replicas: slice) -> SplitBatch:
        """Returns what some of the replicas got."""
        return replace(
            self, leaves=[leaf[replicas] for leaf in self.leaves], counts=self.counts[replicas]
        )

    def part(self, replica_id: int) -> Any:
        """Returns what one replica got."""
        return self.tree.build([leaf[replica_id] for leaf in self.leaves])

    def distributed(self, devices: tuple[Device, ...]) -> Any:
        """Returns the structure with a `PerReplica` for every leaf but None."""

        def joined(part: tuple[Any, ...], of_all: tuple[Any, ...] | None) -> Any:
            if all(component is None for component in part):
                return None
            value = PerReplica.placed(part, devices, self.counts or None, is_input=True)
            if of_all is not None or self.step is not None:
                value.note_origin(self.generation, of_all, self.step)
            return value

        unknown: list[Any] = [None] * len(self.leaves)
        everywhere = unknown if self.of_all is None else self.of_all
        return self.tree.build(list(map(joined, self.leaves, everywhere)))


# Draws batches and splits them. Raises `StopIteration` at the end.
Draw: TypeAlias = Callable[[], SplitBatch]


class Splitter:
    """Splits batches as the options say.

    A replica without samples gets a copy of a sample of the batch, which counts nothing: some
    models cannot take an empty batch. As TensorFlow splits, it gets an empty part (`leaves_empty`).
    The `reader` may know how the source makes batches.
    """

    def __init__(
        self, options: InputOptions = DEFAULT_INPUT_OPTIONS, reader: Reader | None = None
    ) -> None:
        self._given = options.split if callable(options.split) else None
        self._count_samples = options.count_samples
        self.leaves_empty = options.split == "tensorflow"
        self._sizes = tensorflow_sizes if self.leaves_empty else dealt
        self._batch_dim = options.batch_dim
        self._reader = reader or Reader(options.batch_dim)

    def whole(self, batch: Any) -> SplitBatch:
        """Gives all of `batch` to the one replica there is."""
        if self._given is not None:
            return self.split(batch, 1)
        try:
            layout = self._reader.lay_out(batch)
        except UnsupportedError:
            # Nothing is to be split, so it need not be clear where the samples are.
            layout = lay_out(batch, self._batch_dim)
        num_samples = 1 if layout.num_samples is None else layout.num_samples
        return SplitBatch(layout.tree, [(leaf,) for leaf in layout.leaves], (num_samples,))

    def split(
        self, batch: Any, num_parts: int, own: slice = slice(None), slices: Slices | None = None
    ) -> SplitBatch:
        """Splits `batch` over the replicas of all workers.

        Leaves without a batch dimension, such as numbers, text and None, are given to every
        replica. The parts are those of the `own` replicas of this worker, the counts those of all.
        `slices` returns the samples of each replica, if the options do not say that.
        """
        if self._given is not None:
            parts = self._split_by_user(self._given(batch, num_parts), num_parts)
            return replace(parts.of(own), counts=parts.counts)
        layout = self._reader.read(batch)
        num_samples = layout.num_samples or 0
        shares = slices(num_samples) if slices else slices_of(self._sizes(num_samples, num_parts))
        counts = tuple(share.stop - share.start for share in shares)
        if self._count_samples is not None:
            counts = tuple(
                size and self._count(layout.tree.build(layout.part(share)))
                for size, share in zip(counts, shares, strict=True)
            )
        parts_of = [self._part(layout, share) for share in shares[own]]
        return SplitBatch(layout.tree, list(zip(*parts_of, strict=True)), counts)

    def _part(self, layout: Layout, share: slice) -> list[Any]:
        if share.start < share.stop or self.leaves_empty or not layout.num_samples:
            return layout.part(share)
        return [copied(leaf) for leaf in layout.part(slice(0, 1))]

    def _split_by_user(self, made: Any, num_parts: int) -> SplitBatch:
        if not isinstance(made, (list, tuple)) or len(made) != num_parts:
            found = f"{len(made)} parts" if isinstance(made, (list, tuple)) else repr(type(made))
            raise UnsupportedError(
                f"The `split` of `InputOptions` must return a list of {num_parts} parts, one per "
                f"replica of all workers, got {found}. Return None for a replica without samples."
            )
        if all(part is None for part in made):
            raise UnsupportedError(
                "The `split` of `InputOptions` returned only None. Give at least one replica a "
                "part."
            )
        parts = self.join([MISSING if part is None else part for part in made])
        if not parts.is_counted:
            raise UnsupportedError(
                "The number of samples in each part that `split` returned is not known, so neither "
                "is the weight of each replica's loss. Give `InputOptions` a function "
                "`count_samples` that returns the number of samples of one part."
            )
        return parts

    def join(self, batches: Sequence[Any]) -> SplitBatch:
        """Gives each replica its own whole batch; all must have one structure.

        A batch may be `MISSING`, but not all. If the part in its place would have to be empty, and
        there is no such thing, the input ends: it raises `StopIteration`.
        """
        found = [0 if batch is MISSING else self._count(batch) for batch in batches]
        is_counted = None not in found
        counts = tuple(n if is_counted and n is not None else int(n != 0) for n in found)
        pairs = list(zip(batches, counts, strict=True))
        # The first with samples, if there is one.
        some, num_samples = max((p for p in pairs if p[0] is not MISSING), key=lambda p: p[1] > 0)
        can_lend = num_samples > 0 and not self.leaves_empty
        filled = [
            self.spare(some) if batch is MISSING or (n == 0 and can_lend) else batch
            for batch, n in pairs
        ]
        if any(batch is MISSING for batch in filled):
            raise StopIteration
        return replace(grouped(filled, counts), is_counted=is_counted)

    def _count(self, batch: Any) -> int | None:
        if self._count_samples is None:
            return self._reader.count(batch)
        count = self._count_samples(batch)
        if not isinstance(count, int) or count < 0:
            raise UnsupportedError(
                "The `count_samples` of `InputOptions` must return the number of samples of a "
                f"batch, got {count!r}."
            )
        return count

    def spare(self, batch: Any, num_samples: int | None = None) -> Any:
        """Returns what a replica without samples gets where others get `batch`.

        It is a copy of a sample or, if it is not plain where the samples lie, of the batch, and so
        it is if the batch has no samples. Where it has to be empty and cannot be, it is `MISSING`.
        """
        if num_samples == 0:
            return copied(batch)
        if not self.leaves_empty:
            return copied(self._reader.some_of(batch, slice(0, 1)))
        layout = self._reader.lay_out(batch)
        if not layout.sizes:
            return MISSING
        return copied(layout.tree.build(layout.part(slice(0, 0))))


def copied(structure: Any, to: str | None = None) -> Any:
    """Returns a structure that shares no memory: replicas may change their input in place.

    Its tensors are on the device `to`, if that is given.
    """

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().to(to or leaf.device, copy=True)
        return copy.deepcopy(leaf)

    return map_leaves(copy_of, structure)


def grouped(
    batches: Sequence[Any], counts: tuple[int, ...] = (), tree: Tree | None = None
) -> SplitBatch:
    """Puts the batches of the replicas into one structure: that of `tree`, if it is known."""
    if tree is not None and all(tree.fits(batch) for batch in batches):
        leaves = [tree.leaves_of(batch) for batch in batches]
        return SplitBatch(tree, list(zip(*leaves, strict=True)), counts)
    # Lists with an entry per sample may have different lengths.
    for is_leaf in (is_column, is_inner_list, is_list):
        trees, leaves = zip(*(taken_apart(batch, is_leaf) for batch in batches), strict=True)
        if all(other.paths == trees[0].paths for other in trees):
            return SplitBatch(trees[0], list(zip(*leaves, strict=True)), counts)
    trees = [taken_apart(batch, is_column)[0] for batch in batches]
    other = next(i for i, tree in enumerate(trees) if tree.paths != trees[0].paths)
    raise ReplicaMismatchError(
        f"The batch of replica {other} holds {_listed(trees[other])}, but the batch of replica 0 "
        f"holds {_listed(trees[0])}. Give all batches the same structure."
    )


def _listed(tree: Tree) -> str:
    return ", ".join(path or "one leaf" for path in tree.paths) or "nothing"
