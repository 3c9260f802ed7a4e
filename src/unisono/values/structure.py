"""Takes nested values apart into leaves, and puts them together again.

Containers are lists, tuples, named tuples, mappings, dataclasses, attrs classes, and types
registered with torch's pytree. Everything else is a leaf, including distributed values.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from unisono.devices import Device
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.torch_private import pytree
from unisono.values.distributed import DistributedValues, PerReplica

# Types that are never containers.
_LEAVES = frozenset([Tensor, nn.Parameter, type(None), bool, int, float, str])
# Also registered with torch's pytree, but opened here, which names the leaves.
_PLAIN = frozenset([list, tuple, dict, OrderedDict, defaultdict])

IsLeaf: TypeAlias = Callable[[Any, int], bool]


class Opened(NamedTuple):
    """A container: the names of its children, the children, and how to make one like it."""

    names: tuple[str, ...]
    children: Sequence[Any]
    make: Callable[[list[Any]], Any]


def opened(value: Any) -> Opened | None:
    """Opens one container. Returns None if `value` is a leaf."""
    kind: Any = type(value)
    if kind in _LEAVES or isinstance(value, (DistributedValues, Tensor, nn.Module, type)):
        return None
    if kind is list or kind is tuple:
        return Opened(_numbers(len(value)), value, kind)
    if isinstance(value, list):
        return Opened(_numbers(len(value)), value, functools.partial(_list_like, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names = tuple(f".{name}" for name in value._fields)
        return Opened(names, value, lambda items: kind(*items))
    if kind in pytree.SUPPORTED_NODES and kind not in _PLAIN:
        node = pytree.SUPPORTED_NODES[kind]
        children, context = node.flatten_fn(value)
        return Opened(
            _numbers(len(children)), children, lambda items: node.unflatten_fn(items, context)
        )
    if isinstance(value, Mapping):
        names = tuple(f"[{key!r}]" for key in value)
        return Opened(names, list(value.values()), functools.partial(_mapping_like, value))
    fields = [name for name in _fields(kind) if hasattr(value, name)]
    if not fields:
        return None
    children = [getattr(value, name) for name in fields]
    names = tuple(f".{name}" for name in fields)
    return Opened(names, children, functools.partial(_record_like, value, fields))


@functools.lru_cache
def _numbers(count: int) -> tuple[str, ...]:
    return tuple(f"[{i}]" for i in range(count))


def _fields(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [field.name for field in getattr(kind, "__attrs_attrs__", ())]


def _list_like(value: list[Any], items: list[Any]) -> Any:
    clone = copy.copy(value)
    clone[:] = items
    return clone


def _mapping_like(value: Mapping[Any, Any], items: list[Any]) -> Any:
    if not isinstance(value, MutableMapping) or type(value) is dict:
        return dict(zip(value, items, strict=True))
    clone = copy.copy(value)
    for key, item in zip(value, items, strict=True):
        clone[key] = item
    return clone


def _record_like(value: Any, fields: Sequence[str], items: list[Any]) -> Any:
    clone = copy.copy(value)
    for name in [*getattr(clone, "__dict__", ())]:
        # Computed from the fields that are about to change.
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del clone.__dict__[name]
    for name, item in zip(fields, items, strict=True):
        # The only way to write to a frozen dataclass.
        object.__setattr__(clone, name, item)
    return clone


@dataclasses.dataclass(frozen=True)
class Tree:
    """A structure without its leaves. Structures of the same containers and names are equal."""

    paths: tuple[str, ...]
    kinds: tuple[type, ...]
    _root: _Node | None = dataclasses.field(compare=False, repr=False)

    def build(self, leaves: Sequence[Any]) -> Any:
        """Returns the structure with `leaves` in it."""
        return leaves[0] if self._root is None else self._root.build(iter(leaves))

    def leaves_of(self, structure: Any) -> list[Any]:
        """Returns the parts of a structure at the places of these leaves."""
        return [structure] if self._root is None else self._root.leaves_of(structure)

    def fits(self, structure: Any) -> bool:
        """Whether a structure has parts at the places of all leaves, and nowhere else."""
        return self._root is None or self._root.fits(structure)


class _Node(NamedTuple):
    children: tuple[Any, ...]
    make: Callable[[list[Any]], Any]

    def build(self, leaves: Iterator[Any]) -> Any:
        return self.make([next(leaves) if c is None else c.build(leaves) for c in self.children])

    def leaves_of(self, structure: Any) -> list[Any]:
        container = opened(structure)
        assert container is not None
        found: list[Any] = []
        for node, child in zip(self.children, container.children, strict=True):
            found += [child] if node is None else node.leaves_of(child)
        return found

    def fits(self, structure: Any) -> bool:
        container = opened(structure)
        if container is None or len(container.children) != len(self.children):
            return False
        pairs = zip(self.children, container.children, strict=True)
        return all(node is None or node.fits(child) for node, child in pairs)


def take_apart(structure: Any, is_leaf: IsLeaf | None = None) -> tuple[Tree, list[Any]]:
    """Returns the tree of `structure`, and its leaves in order."""
    visitor = _Visitor(is_leaf)
    try:
        root = visitor.visit(structure, "", ())
    except RecursionError:
        raise _too_deep() from None
    return Tree(tuple(visitor.paths), tuple(visitor.kinds), root), visitor.leaves


class _Visitor:
    """Walks through a structure. A recursive closure would leave a reference cycle."""

    def __init__(self, is_leaf: IsLeaf | None) -> None:
        self._is_leaf = is_leaf
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.kinds: list[type] = []

    def visit(self, value: Any, path: str, above: tuple[int, ...]) -> _Node | None:
        container = None
        # A container that contains itself has no end.
        is_leaf = self._is_leaf
        if id(value) not in above and (is_leaf is None or not is_leaf(value, len(above))):
            container = opened(value)
        if container is None:
            self.leaves.append(value)
            self.paths.append(path)
            return None
        self.kinds.append(type(value))
        inner = (*above, id(value))
        named = zip(container.names, container.children, strict=True)
        children = tuple(self.visit(child, path + name, inner) for name, child in named)
        return _Node(children, container.make)


def _too_deep() -> UnsupportedError:
    return UnsupportedError(
        "A structure of lists, tuples and dicts contains itself, or is nested too deeply. Use a "
        "structure of a few levels."
    )


def regroup(
    structures: Sequence[Any],
    devices: tuple[Device, ...],
    counts: tuple[int, ...] | None = None,
) -> Any:
    """Makes one structure of `PerReplica` values from the structures of the replicas."""
    try:
        return _regroup(structures, (), devices, counts)
    except RecursionError:
        raise _too_deep() from None
    except _OtherStructure:
        trees = [take_apart(structure)[0] for structure in structures]
        other = next((i for i, tree in enumerate(trees) if tree != trees[0]), len(trees) - 1)
        raise ReplicaMismatchError(
            f"Replica {other} returned {_spelled(structures[other])}, but replica 0 returned "
            f"{_spelled(structures[0])}. Return the same nesting of lists, tuples, dicts and "
            "dataclasses on every replica."
        ) from None


class _OtherStructure(Exception):
    """Two replicas returned different structures."""


def _regroup(
    structures: Sequence[Any],
    above: tuple[int, ...],
    devices: tuple[Device, ...],
    counts: tuple[int, ...] | None,
) -> Any:
    first = structures[0]
    if all(other is first for other in structures):
        return first
    found = [opened(structure) for structure in structures]
    containers = [one for one in found if one is not None]
    if not containers or id(first) in above:
        return PerReplica.placed(tuple(structures), devices, counts)
    shapes = {
        (type(one), each.names if each else ()) for one, each in zip(structures, found, strict=True)
    }
    if len(shapes) > 1:
        raise _OtherStructure
    inner = (*above, id(first))
    by_child = zip(*(one.children for one in containers), strict=True)
    return containers[0].make([_regroup(child, inner, devices, counts) for child in by_child])


def select_replica(replica_id: int, structure: Any) -> Any:
    """Replaces every distributed value in `structure` by its component of one replica."""
    # The common case: tensors, which need no opening.
    kind = type(structure)
    if isinstance(structure, DistributedValues):
        return structure.select(replica_id)
    if kind in _LEAVES:
        return structure
    try:
        if kind is tuple or kind is list:
            return kind(
                [
                    part if type(part) in _LEAVES else select_replica(replica_id, part)
                    for part in structure
                ]
            )
        if kind is dict:
            return {key: select_replica(replica_id, part) for key, part in structure.items()}
    except RecursionError:
        raise _too_deep() from None
    container = opened(structure)
    if container is None or not any(
        isinstance(leaf, DistributedValues) for leaf in flatten(structure)[0]
    ):
        return structure
    return container.make([select_replica(replica_id, child) for child in container.children])


def map_leaves(fn: Callable[[Any], Any], structure: Any) -> Any:
    """Applies `fn` to every leaf of `structure`; a distributed value is one leaf."""
    tree, leaves = take_apart(structure)
    return tree.build([fn(leaf) for leaf in leaves])


def flatten(structure: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the leaves of `structure`, and a function that rebuilds it with other leaves."""
    tree, leaves = take_apart(structure)
    return leaves, tree.build


class _Star:
    def __repr__(self) -> str:
        return "*"


def _spelled(structure: Any) -> str:
    return repr(map_leaves(lambda _: _Star(), structure))


def tensors_of(structure: Any) -> list[Tensor]:
    """Returns all tensors in a structure, including those of distributed values."""
    found: list[Tensor] = []
    for leaf in flatten(structure)[0]:
        if isinstance(leaf, DistributedValues):
            found += tensors_of(list(leaf.values))
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def map_tensors(fn: Callable[[Tensor], Any], structure: Any) -> Any:
    """Applies `fn` to every tensor in a structure, including those of distributed values."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            return PerReplica.placed(tuple(map(mapped, leaf.values)), leaf.devices, leaf.counts)
        if isinstance(leaf, DistributedValues):
            return type(leaf).placed(tuple(map(mapped, leaf.values)), leaf.devices)
        return fn(leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(mapped, structure)
