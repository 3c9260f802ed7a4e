"""Which worker has which replicas, and which terms a worker contributes to a sum."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.communicators import Communicator, Node, all_reduce_nodes, nodes_of, plain_terms
from unisono.options import ReduceOp


def dealt(num_replicas: int, num_workers: int) -> tuple[int, ...]:
    """Returns how many replicas each worker has if they are split as evenly as possible.

    >>> dealt(8, 3), dealt(4, 4)
    ((3, 3, 2), (1, 1, 1, 1))
    """
    share, num_larger = divmod(num_replicas, num_workers)
    return tuple(share + (rank < num_larger) for rank in range(num_workers))


@dataclass(frozen=True)
class Terms:
    """What each worker contributes to a sum: its replicas, combined as far as the tree allows."""

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


@dataclass(frozen=True)
class ReplicaLayout:
    """How many replicas each worker has. Their numbers follow the ranks of the workers."""

    counts: tuple[int, ...]
    rank: int

    @functools.cached_property
    def ranges(self) -> list[range]:
        """The replicas of each worker."""
        ends = itertools.accumulate(self.counts, initial=0)
        return list(itertools.starmap(range, itertools.pairwise(ends)))

    @property
    def total(self) -> int:
        """The number of replicas of all workers."""
        return self.ranges[-1].stop

    @property
    def own(self) -> range:
        """The replicas of this worker."""
        return self.ranges[self.rank]

    @property
    def are_equal(self) -> bool:
        """Whether all workers have the same number of replicas."""
        return len(set(self.counts)) == 1

    @property
    def are_several(self) -> bool:
        """Whether a worker has several replicas, so that all have `PerReplica` values."""
        return max(self.counts) > 1

    @functools.cached_property
    def terms(self) -> Terms:
        """What workers contribute to a sum in the order of the tree."""
        together = plain_terms(self.ranges)
        if together is None:
            nodes = [tuple(nodes_of(own.start, own.stop, self.total)) for own in self.ranges]
            return Terms(tuple(nodes), self.rank, self.own.start, are_plain=False)
        return Terms(
            tuple(
                tuple(
                    Node(first, min(first + together, own.stop))
                    for first in range(own.start, own.stop, together)
                )
                for own in self.ranges
            ),
            self.rank,
            self.own.start,
            are_plain=True,
        )

    @functools.cached_property
    def whole(self) -> Terms:
        """What workers contribute if each combines all of its replicas itself."""
        nodes = tuple((Node(own.start, own.stop),) for own in self.ranges)
        return Terms(nodes, self.rank, self.own.start, are_plain=True)

    @functools.cached_property
    def apart(self) -> Terms:
        """What workers contribute if each replica is a term."""
        nodes = [tuple(Node(i, i + 1) for i in own) for own in self.ranges]
        return Terms(tuple(nodes), self.rank, self.own.start, are_plain=False)
