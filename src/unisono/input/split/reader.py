"""Whether lists in a batch are fields, with the samples in their tensors, or hold one per sample.

[images, labels]                fields: each tensor has a row per sample
[sample, sample, sample]        one entry per sample, as `collate_fn=list` makes it
([image, image], [box, box])    fields, of which each has an entry per sample

`default_collate` makes only fields. Otherwise the number of samples decides, if the source knows
it. What can be read in two ways is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
from torch import Tensor

from unisono.errors import UnsupportedError
from unisono.input.split.layout import (
    IsLeaf,
    Layout,
    check_leaves,
    children,
    is_column,
    is_inner_list,
    is_list,
    lay_out,
    read_as,
)
from unisono.values import opened

# Ways to take a batch apart, each with what it makes.
Readings: TypeAlias = dict[IsLeaf, Layout]

# An image has up to four: red, green, blue and how opaque it is.
_MOST_CHANNELS = 4
_IMAGE_DIMS = 3


class Reader:
    """Finds out how batches are laid out.

    Args:
        batch_dim: Where the samples are, if the options say so.
        batch_sizes: How many samples the first batch may have, if its source knows.
        are_stacked: Whether `default_collate` makes the batches.
    """

    def __init__(
        self, batch_dim: Any = None, batch_sizes: Sequence[int] = (), *, are_stacked: bool = False
    ) -> None:
        self._batch_dim = batch_dim
        self._batch_sizes = frozenset(batch_sizes)
        self._are_stacked = are_stacked
        # How a batch was read for certain. The others are read alike.
        self._known: IsLeaf | None = None

    def read(self, batch: Any) -> Layout:
        """Returns the layout of a batch that is to be split. Its leaves agree on the samples."""
        layout = self.lay_out(batch)
        check_leaves(layout)
        return layout

    def lay_out(self, batch: Any) -> Layout:
        """Returns the layout of a batch, whose leaves need not agree on the samples.

        Raises:
            UnsupportedError: If the batch can be read in two ways.
        """
        rows = lay_out(batch, self._batch_dim)
        if not self._may_hold_lists(batch, rows):
            return rows
        if self._known is is_column and rows.num_samples is not None:
            return rows
        lists = _lists(batch, rows)
        if self._known in lists:
            return lists[self._known]
        if rows.num_samples is None:
            return self._certain_lists(batch, lists) or rows
        if not lists:
            self._known = is_column
            return rows
        if {rows.num_samples, *(layout.num_samples for layout in lists.values())} == {1}:
            # Either way, the first replica gets it all.
            return rows
        bare = lists.get(is_inner_list)
        if bare is not None and bare.num_samples == rows.num_samples and _are_bare(bare):
            return bare
        chosen = self._chosen(batch, rows, lists)
        if chosen is None:
            _refuse(rows, lists)
        if self._batch_sizes or (_has_lists(rows.tree.kinds[1:]) and is_inner_list not in lists):
            self._known = chosen
        return rows if chosen is is_column else lists[chosen]

    def count(self, batch: Any) -> int | None:
        """Returns how many samples a batch holds, or None if its leaves do not agree on that."""
        images = self._unread_images(batch)
        if images:
            return read_as(batch, is_list if images is batch else is_inner_list).num_samples
        layout = self.lay_out(batch)
        if layout.num_samples is None and self._may_hold_lists(batch, layout):
            layout = read_as(batch, is_inner_list)
        return layout.num_samples

    def some_of(self, batch: Any, share: slice) -> Any:
        """Returns some samples of a batch that need not be split, if it is plain where they lie."""
        try:
            layout = self.lay_out(batch)
        except UnsupportedError:
            return batch
        if layout.num_samples is None or self._unread_images(batch):
            return batch
        return layout.tree.build(layout.part(share))

    def _may_hold_lists(self, batch: Any, rows: Layout) -> bool:
        """Whether there are lists in a batch that may have an entry per sample."""
        is_plain = rows.num_samples is not None
        if self._batch_dim is not None or (self._are_stacked and is_plain):
            return False
        kinds = rows.tree.kinds
        if not is_plain or self._batch_sizes or _has_lists(kinds[1:]):
            return _has_lists(kinds)
        return _are_images(batch) or _are_records(batch)

    def _unread_images(self, batch: Any) -> Sequence[Any]:
        """Returns a list that may hold an image per sample, if it is not known whether it does."""
        is_known = self._known or self._are_stacked or self._batch_dim is not None
        return () if is_known else _images(batch)

    def _certain_lists(self, batch: Any, lists: Readings) -> Layout | None:
        """Reads lists as one entry per sample, if the batch makes certain that they are."""
        fitting = [
            name
            for name, layout in lists.items()
            if layout.num_samples in self._batch_sizes
            or (name is is_inner_list and any(map(_are_records, layout.leaves)))
        ]
        samples = [name for name in fitting if _may_be_samples(lists[name])] or fitting
        if not samples:
            return None
        if len(samples) > 1 and isinstance(batch, list):
            raise UnsupportedError(
                f"A list of {len(batch)} lists or tuples can be read in two ways: one sample per "
                "entry, or one sample per entry of these. Use `InputOptions(split=...)` with a "
                "function that splits the list, or return a tuple of columns in `collate_fn`."
            )
        self._known = samples[0]
        return lists[self._known]

    def _chosen(self, batch: Any, rows: Layout, lists: Readings) -> IsLeaf | None:
        """Chooses between rows and lists, if both are possible; None if that cannot be told."""
        sizes = self._batch_sizes
        if not sizes:
            return is_column if _are_rows(batch, rows, lists) else None
        # By convention, a tuple has fields, unless it holds images.
        is_tuple = isinstance(batch, tuple) and not _are_images(batch)
        fitting = {name: one for name, one in lists.items() if one.num_samples in sizes}
        samples = [name for name, one in fitting.items() if _may_be_samples(one)]
        if is_tuple and is_list in samples and (len(samples) > 1 or rows.num_samples in sizes):
            samples.remove(is_list)
        if rows.num_samples in sizes:
            return None if samples else is_column
        if fitting:
            if is_tuple and not samples and is_inner_list not in lists:
                return is_column
            is_certain = len(samples) == 1 and not (is_tuple and samples == [is_list])
            return samples[0] if is_certain else None
        # The last batch of a stream may be shorter, or the collate function changes the number.
        possible = [one for name, one in lists.items() if not (is_tuple and name is is_list)]
        return None if any(map(_may_be_samples, possible)) else is_column


def _lists(batch: Any, rows: Layout) -> Readings:
    """Returns the layouts with an entry per sample in lists: in inner ones, or in the batch."""
    lists = {name: read_as(batch, name) for name in (is_inner_list, is_list)}
    return {
        name: layout
        for name, layout in lists.items()
        if layout.num_samples is not None and layout.tree != rows.tree
    }


def _has_lists(kinds: Sequence[type]) -> bool:
    return any(issubclass(kind, (list, tuple)) for kind in kinds)


def _refuse(rows: Layout, lists: Readings) -> NoReturn:
    layout = next(iter(lists.values()))
    named = zip(layout.tree.paths, layout.leaves, strict=True)
    path, entries = next((p, leaf) for p, leaf in named if p not in rows.tree.paths)
    what = f"{type(entries).__name__} of {len(entries)} entries with tensors"
    raise UnsupportedError(
        f"{f'{path}, a {what},' if path else f'A {what}'} can be read in two ways: one sample per "
        f"entry, or {rows.num_samples} samples in the first dimension of each tensor. Use "
        "`InputOptions(split=...)` with a function that splits the list for the first, and "
        "`InputOptions(batch_dim=0)` for the second."
    )


def _are_rows(batch: Any, rows: Layout, lists: Readings) -> bool:
    """Whether tensors in lists are split, though they might be samples, of a number not known."""
    images = _images(batch)
    if len({image.shape for image in images}) > 1 and (rows.num_samples or 0) <= _MOST_CHANNELS:
        return False
    if isinstance(batch, list) and len(batch) > 1 and _are_records(batch):
        return not _may_be_samples(lists[is_list])
    inner = lists.get(is_inner_list)
    if inner is None or inner.num_samples != rows.num_samples or inner.num_samples == 1:
        return True
    opened_lists = [leaf for leaf in inner.leaves if isinstance(leaf, list)]
    return not opened_lists or not _may_be_samples(inner)


def _images(batch: Any) -> Sequence[Tensor]:
    """Returns a list in `batch` that may hold one image per sample."""
    return next(filter(_are_images, [batch, *children(batch)]), ())


def _are_images(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 1
        and all(isinstance(one, Tensor) and one.dim() == _IMAGE_DIMS for one in value)
        and len({one.dtype for one in value}) == 1
    )


def _are_records(leaf: Any) -> bool:
    """Whether this is a list with something named per sample, such as the boxes of an image."""
    return isinstance(leaf, (list, tuple)) and all(
        isinstance(one, Mapping) or dataclasses.is_dataclass(one) for one in leaf
    )


def _are_bare(layout: Layout) -> bool:
    """Whether the lists with an entry per sample hold numbers as tensors, or a list only None."""
    lists = [leaf for leaf in layout.leaves if isinstance(leaf, (list, tuple))]
    return all(
        is_column(leaf, 1)
        or all(isinstance(one, Tensor) and one.dim() == 0 for one in leaf)
        or (isinstance(leaf, list) and all(one is None for one in leaf))
        for leaf in lists
    )


def _may_be_samples(layout: Layout) -> bool:
    """Whether the entries of each list are of one kind, as samples of one dataset are."""
    lists = [leaf for leaf in layout.leaves if isinstance(leaf, (list, tuple))]
    return all(len(set(map(_kind_of, leaf))) == 1 for leaf in lists)


def _kind_of(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.dtype, value.ndim
    container = None if is_column(value, 1) else opened(value)
    if container is None:
        return None
    return type(value), container.names, tuple(map(_kind_of, container.children))
