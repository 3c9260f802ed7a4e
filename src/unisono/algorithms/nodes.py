"""The nodes of the one tree that orders every sum; see `unisono.kernels.tree`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

# The first of the terms that are summed there, and the end of them.
Node: TypeAlias = tuple[int, int]


def merged(nodes: Iterable[Node], num_terms: int) -> tuple[Node, ...]:
    """Merges nodes of the tree over `num_terms` terms into as few as possible."""
    found: list[Node] = []
    for node in sorted(nodes, key=lambda one: (one[0], -one[1])):
        if found and node[1] <= found[-1][1]:
            continue
        found.append(node)
        while len(found) > 1 and are_siblings(found[-2], found[-1], num_terms):
            right, left = found.pop(), found.pop()
            found.append((left[0], right[1]))
    return tuple(found)


def children(node: Node) -> tuple[Node, Node]:
    """Returns the two nodes whose sum is this node."""
    start, stop = node
    middle = start + (1 << ((stop - start - 1).bit_length() - 1))
    return (start, middle), (middle, stop)


def are_siblings(left: Node, right: Node, num_terms: int) -> bool:
    """Whether the sum of two nodes is a node of the tree over `num_terms` terms."""
    width = right[0] - left[0]
    is_node = width & (width - 1) == 0 and left[0] % (2 * width) == 0
    return left[1] == right[0] and is_node and right[1] == min(left[0] + 2 * width, num_terms)
