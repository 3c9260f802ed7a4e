"""How a batch is laid out: its leaves, and along which dimension of each the samples lie.

A list or tuple without a tensor in it, such as names or token lists, is a *column*: one leaf with
one entry per sample. A list or tuple of tuples, or a tuple of lists, is not one column but several.
Lists with a tensor per sample, such as images of different sizes, are columns where that is
certain.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from unisono.arguments import in_words
from unisono.errors import UnsupportedError
from unisono.values import (
    DistributedValues,
    PerReplica,
    Tree,
    as_tensor,
    flatten,
    opened,
    take_apart,
)

Dims: TypeAlias = list[int | None]
IsLeaf: TypeAlias = Callable[[Any, int], bool]

# What torch has a dtype for: bool, signed, unsigned, float and complex.
_NUMERIC = "biufc"
# What every replica gets as it is, though it has a length.
_GIVEN_WHOLE = (str, bytes, numbers.Number, Tensor, np.ndarray, np.generic)
_LAYOUTS = (torch.strided, torch.sparse_coo)
_WAYS_OUT = (
    "Pad them in `collate_fn`, name the dimension with `InputOptions(batch_dim=...)`, or split "
    "batches yourself with `InputOptions(split=...)`."
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A batch taken apart, with the dimension of the samples of each leaf.

    It is None if every replica gets all of a leaf, and the leaf is `whole` if the options say so.
    Arrays of numbers are tensors now.
    """

    tree: Tree
    leaves: list[Any]
    dims: Dims
    whole: frozenset[str] = frozenset()

    @property
    def sizes(self) -> dict[str, int]:
        """How many samples each leaf holds that holds samples, by the name of the leaf."""
        named = zip(self.tree.paths, self.leaves, self.dims, strict=True)
        return {
            path or "the batch": _length(leaf, dim) for path, leaf, dim in named if dim is not None
        }

    @property
    def num_samples(self) -> int | None:
        """How many samples the batch holds; None if its leaves do not agree on that."""
        sizes = set(self.sizes.values())
        return sizes.pop() if len(sizes) == 1 else None

    def part(self, share: slice) -> list[Any]:
        """Returns the leaves of some samples: views of the batch."""
        return [
            leaf if dim is None else _samples_of(leaf, dim, share)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]


def _samples_of(leaf: Any, dim: int, share: slice) -> Any:
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        return leaf.narrow_copy(dim, share.start, share.stop - share.start)
    return leaf[(slice(None),) * dim + (share,)] if dim else leaf[share]


def _length(leaf: Any, dim: int) -> int:
    if isinstance(leaf, Tensor):
        # Not of its shape: a nested tensor has none.
        return leaf.size(dim)
    return int(leaf.shape[dim]) if isinstance(leaf, np.ndarray) else len(leaf)


def lay_out(batch: Any, batch_dim: Any = None) -> Layout:
    """Takes a batch apart, with the samples along `batch_dim` or else the first dimension."""
    layout = read_as(batch, is_column)
    if batch_dim is None:
        return layout
    wanted = _spread(layout.tree, batch, batch_dim)
    named = zip(layout.tree.paths, layout.leaves, layout.dims, wanted, strict=True)
    dims = [None if dim is None else _checked(path, leaf, own) for path, leaf, dim, own in named]
    pairs = zip(layout.tree.paths, wanted, strict=True)
    whole = frozenset(path for path, own in pairs if own is None)
    return dataclasses.replace(layout, dims=dims, whole=whole)


def children(value: Any) -> Iterable[Any]:
    """Returns what a container holds. A leaf holds nothing."""
    container = opened(value)
    return () if container is None else container.children


def taken_apart(batch: Any, is_leaf: IsLeaf) -> tuple[Tree, list[Any]]:
    """Takes a batch apart; arrays of numbers become tensors that share their memory."""
    tree, leaves = take_apart(batch, is_leaf)
    return tree, [as_tensor(leaf) if _is_numeric(leaf) else leaf for leaf in leaves]


def _is_numeric(leaf: Any) -> bool:
    # A tensor has no mask.
    is_array = isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray)
    return is_array and leaf.dtype.kind in _NUMERIC


def read_as(batch: Any, is_leaf: IsLeaf) -> Layout:
    """Takes a batch apart, with the samples along the first dimension of each leaf."""
    tree, leaves = taken_apart(batch, is_leaf)
    return Layout(tree, leaves, [0 if _has_samples(leaf) else None for leaf in leaves])


def _has_samples(leaf: Any) -> bool:
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.ndim > 0
    return isinstance(leaf, list) or type(leaf) is tuple


def _spread(tree: Tree, batch: Any, batch_dim: Any) -> Dims:
    """Returns what a structure of dimensions says of each leaf; one may stand for many leaves."""
    found: Dims = []

    def visit(value: Any, wanted: Any, path: str, depth: int) -> None:
        container = None if is_column(value, depth) else opened(value)
        if wanted is None or isinstance(wanted, int):
            leaves = [value] if container is None else take_apart(value, is_column)[1]
            found.extend([wanted] * len(leaves))
            return
        inner = opened(wanted)
        if container is None or inner is None or inner.names != container.names:
            raise UnsupportedError(
                f"`batch_dim` must be an int, None or a structure like the batch, got {wanted!r} "
                f"for {path or 'a batch'} of type {type(value).__name__}."
            )
        triples = zip(container.children, inner.children, container.names, strict=True)
        for child, own, name in triples:
            visit(child, own, path + name, depth + 1)

    visit(batch, batch_dim, "", 0)
    assert len(found) == len(tree.paths)
    return found


def _checked(path: str, leaf: Any, dim: int | None) -> int | None:
    if dim is None or isinstance(leaf, (list, tuple)):
        return None if dim is None else 0
    if not -leaf.ndim <= dim < leaf.ndim:
        raise UnsupportedError(
            f"`batch_dim` is {dim}, but {path or 'the batch'} has the shape {tuple(leaf.shape)}. "
            "Give each tensor its own dimension, in the structure of the batch, for example "
            "`batch_dim=(1, 0)`; None copies a tensor to every replica."
        )
    return int(dim % leaf.ndim)


def check_leaves(layout: Layout) -> None:
    """Raises unless all leaves with samples agree on their number, and the others have none."""
    for path, leaf, dim in zip(layout.tree.paths, layout.leaves, layout.dims, strict=True):
        if path not in layout.whole:
            _check_leaf(path, leaf, dim)
    if not layout.sizes:
        leaf = layout.leaves[0] if layout.leaves else "nothing"
        raise UnsupportedError(
            f"Cannot split {in_words(leaf)} over the replicas: it has no batch dimension. Wrap the "
            "dataset in a `DataLoader` with the global batch size, or split batches yourself with "
            "`InputOptions(split=...)`."
        )
    if layout.num_samples is None:
        listed = ", ".join(f"{path} has {size}" for path, size in layout.sizes.items())
        raise UnsupportedError(
            "All tensors, arrays and lists of a batch must have the same number of samples in "
            f"their batch dimension, got: {listed}. {_WAYS_OUT}"
        )


def _check_leaf(path: str, leaf: Any, dim: int | None) -> None:
    if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout not in _LAYOUTS):
        kind = "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
        raise UnsupportedError(
            f"Cannot split {path or 'a batch'}, {kind}, over the replicas. Make batches of "
            "dense or sparse COO tensors: call `.to_padded_tensor(0)` or `.to_sparse()` in "
            "`collate_fn`."
        )
    if dim is not None or isinstance(leaf, _GIVEN_WHOLE):
        return
    hidden = getattr(leaf, "__dict__", {})
    has_rows = any(isinstance(one, (Tensor, np.ndarray)) and one.ndim for one in hidden.values())
    if isinstance(leaf, Sized) or has_rows:
        raise UnsupportedError(
            f"Cannot split {path or 'a batch'}, a {type(leaf).__name__}, over the replicas. "
            "Make batches of tensors, arrays and lists in mappings, lists, tuples or "
            "dataclasses, or split them yourself with `InputOptions(split=...)`. With None for it "
            "in `InputOptions(batch_dim=...)`, every replica gets all of it."
        )


def is_list(value: Any, depth: int) -> bool:
    """Whether this is a list or tuple without names. Packed sequences cannot be split either."""
    if not isinstance(value, (list, tuple)):
        return False
    return not hasattr(value, "_fields") or isinstance(value, PackedSequence)


def is_inner_list(value: Any, depth: int) -> bool:
    """Whether this is a list or tuple inside a batch, and not the batch itself."""
    return (depth > 0 or isinstance(value, PackedSequence)) and is_list(value, depth)


def is_column(value: Any, depth: int) -> bool:
    """Whether this is a list or tuple without tensors, and with one entry per sample."""
    if not is_list(value, depth):
        return False
    if isinstance(value, PackedSequence):
        return True
    if all(item is None for item in value) or _holds_tensors(value):
        return False
    if all(isinstance(item, tuple) for item in value):
        return False
    return isinstance(value, list) or not all(isinstance(item, (list, tuple)) for item in value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray, DistributedValues)):
        return True
    if isinstance(value, (str, bytes, numbers.Number)) or value is None:
        return False
    return any(map(_holds_tensors, children(value)))


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
