"""One host batch becomes a part for each replica: views of it, along the first dimension."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.input.structure import Tree, has_rows, take_apart
from unisono.values import PerReplica, as_tensor

# What torch has a dtype for: bool, signed, unsigned, float and complex.
_NUMERIC = "biufc"
_LAYOUTS = (torch.strided, torch.sparse_coo)

Slices: TypeAlias = Callable[[int], Sequence[slice]]


@dataclass(frozen=True)
class Parts:
    """One step's input, dealt.

    Attributes:
        tree: The structure.
        leaves: For each leaf its parts, by replica id.
        counts: How many samples each replica got: of all workers if `split` has dealt for all.
        is_counted: Whether the leaves agree on the counts, so that they are those of samples.
    """

    tree: Tree
    leaves: list[tuple[Any, ...]]
    counts: tuple[int, ...]
    is_counted: bool = True

    def of(self, replicas: slice) -> Parts:
        """Returns what some of the replicas got."""
        return replace(
            self, leaves=[leaf[replicas] for leaf in self.leaves], counts=self.counts[replicas]
        )

    def emptied(self, num_replicas: int) -> Parts | None:
        """Returns a step of this structure without samples, or None if it cannot be without."""
        firsts = _emptied([leaf[0] for leaf in self.leaves])
        if firsts is None:
            return None
        leaves = [(first,) * num_replicas for first in firsts]
        return Parts(self.tree, leaves, (0,) * num_replicas)


def whole(batch: Any) -> Parts:
    """Gives all of `batch` to the one replica there is."""
    tree, leaves = take_apart(batch)
    leaves = [_read(leaf) for leaf in leaves]
    return Parts(tree, [(leaf,) for leaf in leaves], (_num_samples(leaves),))


def split(batch: Any, slices: Slices, own: slice = slice(None)) -> Parts:
    """Splits `batch` as `slices` says for its number of samples.

    Leaves without a batch dimension, such as numbers, text and None, are given to every replica.

    Args:
        batch: A host batch.
        slices: Returns the samples of each replica of all workers.
        own: Which of these replicas are here. The parts are theirs, the counts those of all.
    """
    tree, leaves = take_apart(batch)
    leaves = [_read(leaf) for leaf in leaves]
    num_samples = _agreed(tree, leaves)
    shares = slices(num_samples)
    counts = tuple(share.stop - share.start for share in shares)
    shares = shares[own]
    parts = [
        tuple(_rows(leaf, share) for share in shares) if has_rows(leaf) else (leaf,) * len(shares)
        for leaf in leaves
    ]
    return Parts(tree, parts, counts)


def join(batches: Sequence[Any]) -> Parts:
    """Gives each replica a whole batch of its own; all must be of one structure."""
    opened = [take_apart(batch) for batch in batches]
    tree = opened[0][0]
    for replica_id, (other, _) in enumerate(opened):
        if other.paths != tree.paths:
            raise ReplicaMismatchError(
                f"The batch of replica {replica_id} holds {_listed(other)}, that of replica 0 "
                f"{_listed(tree)}. Make all batches of one structure."
            )
    by_replica = [[_read(leaf) for leaf in leaves] for _, leaves in opened]
    counts = tuple(_num_samples(leaves) for leaves in by_replica)
    is_counted = all(
        len(leaf) == count
        for leaves, count in zip(by_replica, counts, strict=True)
        for leaf in leaves
        if has_rows(leaf)
    )
    return Parts(tree, list(zip(*by_replica, strict=True)), counts, is_counted)


def empty_like(batch: Any) -> Any | None:
    """Returns `batch` without its samples, or None if no leaf has a batch dimension."""
    tree, leaves = take_apart(batch)
    firsts = _emptied(leaves)
    return None if firsts is None else tree.build(firsts)


def _emptied(leaves: Sequence[Any]) -> list[Any] | None:
    if not any(has_rows(leaf) for leaf in leaves):
        return None
    return [_without_rows(leaf) if has_rows(leaf) else leaf for leaf in leaves]


def _without_rows(leaf: Any) -> Any:
    nothing = _rows(leaf, slice(0, 0))
    # A view would keep the samples in memory.
    return nothing.clone() if isinstance(nothing, Tensor) else nothing


def counts_of(structure: Any) -> tuple[int, ...] | None:
    """Returns how many samples each replica got, or None where the leaves do not agree on it.

    What input was dealt with says so itself, for the replicas of all workers. Other values are
    measured, which are those of this worker; a structure without a `PerReplica` counts as that
    of the only replica.
    """
    leaves = _leaves(structure)
    distributed = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
    found = {leaf.counts for leaf in distributed if leaf.counts is not None}
    if not found:
        parts = [leaf.values for leaf in distributed] or [(leaf,) for leaf in leaves]
        found = {counts for components in parts if (counts := _counts(components)) is not None}
    return found.pop() if len(found) == 1 else None


def _leaves(structure: Any) -> list[Any]:
    if type(structure) is tuple and all(type(one) in (PerReplica, Tensor) for one in structure):
        return list(structure)
    return take_apart(structure)[1]


def _counts(components: Sequence[Any]) -> tuple[int, ...] | None:
    sizes: list[int] = []
    for component in components:
        if type(component) is Tensor and component.dim() > 0:
            # Not of its shape: a nested tensor has none.
            sizes.append(component.size(0))
            continue
        tree, leaves = take_apart(component)
        rows = {len(leaf) for leaf in leaves if has_rows(leaf)}
        if not tree.paths:
            rows = {0}  # A column that ran out of entries.
        if len(rows) != 1:
            return None
        sizes.extend(rows)
    return tuple(sizes)


def _read(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in _NUMERIC:
        return as_tensor(leaf)
    return leaf


def _rows(leaf: Any, share: slice) -> Any:
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        return leaf.narrow_copy(0, share.start, share.stop - share.start)
    return leaf[share]


def _num_samples(leaves: Sequence[Any]) -> int:
    return next((len(leaf) for leaf in leaves if has_rows(leaf)), 1)


def _agreed(tree: Tree, leaves: Sequence[Any]) -> int:
    """Returns the number of samples, on which all leaves with a batch dimension must agree."""
    sizes: dict[str, int] = {}
    for path, leaf in zip(tree.paths, leaves, strict=True):
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout not in _LAYOUTS):
            kind = "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
            raise UnsupportedError(
                f"Cannot split {path or 'a batch'}, {kind}, over the replicas. Make batches of "
                "dense or sparse COO tensors: call `.to_padded_tensor(0)` or `.to_sparse()` in "
                "`collate_fn`."
            )
        if has_rows(leaf):
            sizes[path or "the batch"] = len(leaf)
        elif isinstance(leaf, Sized) and not _is_given_whole(leaf):
            raise UnsupportedError(
                f"Cannot split {path or 'a batch'}, a {type(leaf).__name__}, over the replicas. "
                "Make batches of tensors, arrays and lists in mappings, lists, tuples or "
                "dataclasses."
            )
    if not sizes:
        raise UnsupportedError(
            f"Cannot split {leaves[0] if leaves else 'nothing'!r} over the replicas: it has no "
            "batch dimension. Distribute batches: wrap the dataset in a `DataLoader` with the "
            "global batch size."
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise UnsupportedError(
            "All tensors, arrays and lists of a batch must have one number of samples in their "
            f"first dimension, got: {listed}. Pad them in `collate_fn`, or deal whole batches "
            "with `distribute_datasets_from_function`."
        )
    return next(iter(sizes.values()))


def _is_given_whole(leaf: Any) -> bool:
    return isinstance(leaf, (str, bytes, numbers.Number, Tensor, np.ndarray, np.generic))


def _listed(tree: Tree) -> str:
    return ", ".join(path or "one leaf" for path in tree.paths) or "nothing"
