"""What each worker contributes to a sum: its replicas, combined as far as the tree allows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.communicators import Communicator, Node, all_reduce_nodes, nodes_of, plain_terms
from unisono.options import ReduceOp
from unisono.reductions import ReplicaLayout


@dataclass(frozen=True)
class Terms:
    """The terms of a sum, by the rank of the worker that brings them."""

    by_rank: tuple[tuple[Node, ...], ...]
    rank: int
    first: int
    are_plain: bool

    @functools.cached_property
    def own(self) -> list[slice]:
        """The replicas of each term of this worker, counted from its first replica."""
        return [slice(a - self.first, b - self.first) for a, b in self.by_rank[self.rank]]

    @functools.cached_property
    def are_sums(self) -> bool:
        """Whether a term of some worker is a sum, so that terms have a wide dtype on all."""
        return any(node.stop - node.start > 1 for nodes in self.by_rank for node in nodes)

    def all_reduce(
        self,
        communicator: Communicator,
        op: ReduceOp,
        tensors: Sequence[Tensor],
        count: int | None = None,
    ) -> None:
        """Combines the terms of all workers into the first term of each worker."""
        if self.are_plain:
            communicator.all_reduce(op, tensors, count)
        else:
            all_reduce_nodes(communicator, op, tensors, self.by_rank, count)


@functools.lru_cache(64)
def tree_terms(layout: ReplicaLayout) -> Terms:
    """Returns what workers contribute to a sum in the order of the tree."""
    width = plain_terms(layout.ranges)
    if width is None:
        nodes = [nodes_of(own.start, own.stop, layout.total) for own in layout.ranges]
        return _terms(layout, nodes, are_plain=False)
    nodes = [
        [Node(i, min(i + width, own.stop)) for i in range(own.start, own.stop, width)]
        for own in layout.ranges
    ]
    return _terms(layout, nodes, are_plain=True)


def whole_terms(layout: ReplicaLayout) -> Terms:
    """Returns what workers contribute if each combines all of its replicas itself."""
    return _terms(layout, [[Node(own.start, own.stop)] for own in layout.ranges], are_plain=True)


def apart_terms(layout: ReplicaLayout) -> Terms:
    """Returns what workers contribute if each replica is a term."""
    nodes = [[Node(i, i + 1) for i in own] for own in layout.ranges]
    return _terms(layout, nodes, are_plain=False)


def _terms(layout: ReplicaLayout, nodes: Sequence[Sequence[Node]], *, are_plain: bool) -> Terms:
    return Terms(tuple(map(tuple, nodes)), layout.rank, layout.own.start, are_plain)
