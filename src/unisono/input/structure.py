"""A host batch taken apart: its leaves, what they are called, and how to put others in place.

What is opened: mappings, lists, tuples, named tuples and dataclasses. But a list or tuple without
a tensor in it, such as names or token lists, is a *column*: one leaf, with one entry a sample. A
list or tuple of tuples, or a tuple of lists, is no column but several.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from unisono.devices import Device
from unisono.values import DistributedValues, PerReplica, too_deep

# What `select_replica` looks into. Other containers become one value a replica.
_OPEN = (dict, OrderedDict, defaultdict, list, tuple)

_Make: TypeAlias = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True)
class _Node:
    """A container: its children, None for a leaf, and how to make one like it."""

    children: tuple[_Node | None, ...]
    make: _Make
    is_open: bool
    num_leaves: int

    def build(self, leaves: Iterator[Any]) -> Any:
        return self.make(
            [next(leaves) if child is None else child.build(leaves) for child in self.children]
        )

    def build_distributed(self, parts: Iterator[tuple[Any, ...]], place: _Place) -> Any:
        if self.is_open:
            return self.make([_distributed(child, parts, place) for child in self.children])
        mine = [next(parts) for _ in range(self.num_leaves)]
        return PerReplica.placed(
            tuple(self.build(iter([part[i] for part in mine])) for i in range(len(place.devices))),
            place.devices,
            place.counts,
        )


_Devices: TypeAlias = tuple[Device, ...]
_Counts: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Place:
    devices: _Devices
    counts: _Counts | None


@dataclasses.dataclass(frozen=True)
class Tree:
    """A structure without its leaves.

    Attributes:
        paths: What each leaf is called, such as `['image']` or `[0].x`.
    """

    paths: tuple[str, ...]
    root: _Node | None

    def build(self, leaves: Sequence[Any]) -> Any:
        """Returns the structure with `leaves` in it."""
        return leaves[0] if self.root is None else self.root.build(iter(leaves))

    def build_distributed(
        self,
        parts: Sequence[tuple[Any, ...]],
        devices: _Devices,
        counts: _Counts | None = None,
    ) -> Any:
        """Returns the structure with a `PerReplica` for every leaf but None.

        Args:
            parts: For each leaf its parts, by replica id.
            devices: Where they are.
            counts: How many samples each replica of all workers got, if that is known.
        """
        return _distributed(self.root, iter(parts), _Place(devices, counts))


def take_apart(structure: Any) -> tuple[Tree, list[Any]]:
    """Returns what `structure` is made of, and its leaves in order."""
    leaves: list[Any] = []
    paths: list[str] = []
    try:
        root = _open(structure, "", leaves, paths)
    except RecursionError:
        raise too_deep() from None
    return Tree(tuple(paths), root), leaves


def has_rows(leaf: Any) -> bool:
    """Whether `leaf` has a batch dimension."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.ndim > 0
    return isinstance(leaf, (list, tuple))


def _distributed(node: _Node | None, parts: Iterator[tuple[Any, ...]], place: _Place) -> Any:
    if node is not None:
        return node.build_distributed(parts, place)
    part = next(parts)
    if all(component is None for component in part):
        return None
    return PerReplica.placed(part, place.devices, place.counts)


def _open(value: Any, path: str, leaves: list[Any], paths: list[str]) -> _Node | None:
    opened = _children(value)
    if opened is None:
        leaves.append(value)
        paths.append(path)
        return None
    names, children, make = opened
    before = len(leaves)
    nodes = tuple(
        _open(child, path + name, leaves, paths)
        for name, child in zip(names, children, strict=True)
    )
    is_open = type(value) in _OPEN or hasattr(value, "_fields")
    return _Node(nodes, make, is_open, len(leaves) - before)


def _children(value: Any) -> tuple[list[str], list[Any], _Make] | None:
    if isinstance(value, Mapping):
        return [f"[{key!r}]" for key in value], list(value.values()), _mapping_like(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind: Any = type(value)
        return [f".{name}" for name in value._fields], list(value), lambda items: kind(*items)
    if isinstance(value, (list, tuple)) and not _is_column(value):
        sequence = list if isinstance(value, list) else tuple
        return [f"[{i}]" for i in range(len(value))], list(value), sequence
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        children = [getattr(value, name) for name in fields]
        return [f".{name}" for name in fields], children, _dataclass_like(value, fields)
    return None


def _mapping_like(value: Mapping[Any, Any]) -> _Make:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return lambda items: dict(zip(value, items, strict=True))

    def make(items: list[Any]) -> Any:
        clone = copy.copy(value)
        clone.update(zip(value, items, strict=True))
        return clone

    return make


def _dataclass_like(value: Any, fields: list[str]) -> _Make:
    def make(items: list[Any]) -> Any:
        clone = copy.copy(value)
        for name, item in zip(fields, items, strict=True):
            # A frozen dataclass lets nothing else write to it.
            object.__setattr__(clone, name, item)
        return clone

    return make


def _is_column(value: list[Any] | tuple[Any, ...]) -> bool:
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
    opened = [*value] if isinstance(value, (list, tuple)) else None
    if isinstance(value, Mapping):
        opened = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        opened = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return opened is not None and any(map(_holds_tensors, opened))
