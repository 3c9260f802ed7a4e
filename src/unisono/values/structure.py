"""Nested values of replicas: one structure a replica becomes one of replicas, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unisono.devices import Device
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.values.distributed import DistributedValues, PerReplica

# What is surely no structure.
_LEAVES = frozenset([Tensor, nn.Parameter, type(None), bool, int, float, str])


def regroup(structures: Sequence[Any], devices: tuple[Device, ...]) -> Any:
    """Makes one structure of `PerReplica` values from the structures of the replicas.

    What is the same object on every replica stays as it is, so a single replica is never wrapped.
    """
    if all(type(structure) in _LEAVES for structure in structures):
        return _join(tuple(structures), devices)
    try:
        flat = [pytree.tree_flatten(structure, is_leaf=_is_leaf) for structure in structures]
    except RecursionError:
        raise too_deep() from None
    specs = [spec for _, spec in flat]
    for replica_id, spec in enumerate(specs):
        if spec != specs[0]:
            raise ReplicaMismatchError(
                f"Replica {replica_id} returned another structure than replica 0: "
                f"{_spelled(structures[replica_id])}, not {_spelled(structures[0])}. Return the "
                "same nesting of lists, tuples and dicts on every replica."
            )
    by_leaf = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_join(leaf, devices) for leaf in by_leaf], specs[0])


def _join(components: tuple[Any, ...], devices: tuple[Device, ...]) -> Any:
    first = components[0]
    if all(component is first for component in components):
        return first
    return PerReplica.placed(components, devices)


def select_replica(replica_id: int, structure: Any) -> Any:
    """Replaces every distributed value in `structure` by its component of one replica."""
    # A step is given tensors in tuples and dicts: torch's general way takes ten times as long.
    kind = type(structure)
    if isinstance(structure, DistributedValues):
        return structure.select(replica_id)
    if kind in _LEAVES:
        return structure
    try:
        if kind is tuple or kind is list:
            return kind([select_replica(replica_id, part) for part in structure])
        if kind is dict:
            return {key: select_replica(replica_id, part) for key, part in structure.items()}
        return pytree.tree_map(
            lambda leaf: leaf.select(replica_id) if _is_leaf(leaf) else leaf,
            structure,
            is_leaf=_is_leaf,
        )
    except RecursionError:
        raise too_deep() from None


def map_leaves(fn: Callable[[Any], Any], structure: Any) -> Any:
    """Applies `fn` to every leaf of `structure`; a distributed value is one leaf."""
    leaves, rebuild = flatten(structure)
    return rebuild([fn(leaf) for leaf in leaves])


def flatten(structure: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the leaves of `structure`, and a function that puts others in their place."""
    try:
        leaves, spec = pytree.tree_flatten(structure, is_leaf=_is_leaf)
    except RecursionError:
        raise too_deep() from None
    return leaves, lambda others: pytree.tree_unflatten(list(others), spec)


def too_deep() -> UnsupportedError:
    """Returns the error for a structure that cannot be taken apart."""
    return UnsupportedError(
        "A structure of lists, tuples and dicts holds itself, or is nested too deeply. Give "
        "tensors in a structure of a few levels."
    )


def _is_leaf(value: Any) -> bool:
    return isinstance(value, DistributedValues)


def _spelled(structure: Any) -> str:
    return repr(pytree.tree_map(lambda leaf: "*", structure, is_leaf=_is_leaf)).replace("'*'", "*")


def tensors_of(structure: Any) -> list[Tensor]:
    """Returns all tensors in a structure, those of distributed values too."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(structure, is_leaf=_is_leaf):
        if isinstance(leaf, DistributedValues):
            found += tensors_of(list(leaf.values))
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found
