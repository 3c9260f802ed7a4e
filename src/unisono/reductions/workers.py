"""The workers of a strategy: who has which replicas, and what they exchange besides reductions."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.communicators import Communicator, Node, all_reduce_nodes, nodes_of, plain_terms
from unisono.communicators.communicator import gather_texts
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.kernels import check_gather
from unisono.options import ReduceOp
from unisono.packing import PackLayout, Spec
from unisono.reductions.wire import num_bytes, read, write
from unisono.values import is_sparse

# Small and rare, so it goes through host memory, which every communicator supports.
_HOST = torch.device("cpu")


def dealt(num_things: int, num_parts: int) -> tuple[int, ...]:
    """Returns the sizes of parts that differ by at most one; the larger parts come first.

    >>> dealt(8, 3), dealt(4, 4), dealt(2, 3)
    ((3, 3, 2), (1, 1, 1, 1), (1, 1, 0))
    """
    share, num_larger = divmod(num_things, num_parts)
    return tuple(share + (i < num_larger) for i in range(num_parts))


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
        width = plain_terms(self.ranges)
        if width is None:
            nodes = [nodes_of(own.start, own.stop, self.total) for own in self.ranges]
            return self._terms(nodes, are_plain=False)
        return self._terms(
            [
                [Node(i, min(i + width, own.stop)) for i in range(own.start, own.stop, width)]
                for own in self.ranges
            ],
            are_plain=True,
        )

    @functools.cached_property
    def whole(self) -> Terms:
        """What workers contribute if each combines all of its replicas itself."""
        return self._terms([[Node(own.start, own.stop)] for own in self.ranges], are_plain=True)

    @functools.cached_property
    def apart(self) -> Terms:
        """What workers contribute if each replica is a term."""
        nodes = [[Node(i, i + 1) for i in own] for own in self.ranges]
        return self._terms(nodes, are_plain=False)

    def _terms(self, nodes: Sequence[Sequence[Node]], *, are_plain: bool) -> Terms:
        return Terms(tuple(map(tuple, nodes)), self.rank, self.own.start, are_plain)


class Workers:
    """All workers of the job, including this one."""

    def __init__(self, communicator: Communicator, counts: Sequence[int] | None = None) -> None:
        self.change(communicator, counts)

    def change(self, communicator: Communicator, counts: Sequence[int] | None = None) -> None:
        """Makes these the workers that there are from now on."""
        self.communicator = communicator
        self._counts = None if counts is None else tuple(counts)
        self._layouts: dict[int, ReplicaLayout] = {}

    def layout(self, num_local: int) -> ReplicaLayout:
        """Returns which worker has which replicas, where this worker has `num_local`."""
        if num_local not in self._layouts:
            rank, size = self.communicator.rank, self.communicator.size
            if self._counts is not None and len(set(self._counts)) > 1:
                if num_local != self._counts[rank]:
                    raise ReplicaMismatchError(
                        f"A value has {num_local} components on worker {rank}, which has "
                        f"{self._counts[rank]} of the {sum(self._counts)} replicas. Give one "
                        "component per replica."
                    )
                self._layouts[num_local] = ReplicaLayout(self._counts, rank)
            else:
                self._layouts[num_local] = ReplicaLayout((num_local,) * size, rank)
        return self._layouts[num_local]

    @property
    def are_many(self) -> bool:
        """Whether there is another worker."""
        return self.communicator.size > 1

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites the tensors of all workers with those of the chief."""
        if not self.are_many:
            return
        here = [tensor.detach().to(_HOST) for tensor in tensors]
        layout = PackLayout.of_groups(list(map(Spec.of, here)), [range(len(here))])
        packs = layout.pack(here)
        for pack in packs:
            self.communicator.broadcast(pack)
        layout.write(packs, [tensor.detach() for tensor in tensors])

    def of_chief(self, tensor: Tensor) -> Tensor:
        """Returns the chief's value of `tensor`."""
        if not self.are_many:
            return tensor
        if is_sparse(tensor):
            chosen: Tensor = self.gather_objects(tensor)[0]
            return chosen.to(tensor.device)
        copy = tensor.detach().clone()
        self.share([copy])
        return copy

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all workers, on the device of this worker's. Shapes may differ."""
        if not self.are_many:
            return [tensor]
        gathered = self.communicator.all_gather(tensor.detach().to(_HOST))
        return [one.to(tensor.device) for one in gathered]

    def concatenate(self, tensors: Sequence[Tensor], axis: int) -> tuple[Tensor, int]:
        """Concatenates the tensors of all replicas, and returns where this worker's begin."""
        check_gather(tensors, axis, self.layout(len(tensors)).own.start)
        place = tensors[0].device
        here = torch.cat([tensor.detach().to(place) for tensor in tensors], dim=axis)
        gathered = self.gather(here)
        check_gather(gathered, axis, holder="worker")
        first = sum(other.shape[axis] for other in gathered[: self.communicator.rank])
        return (torch.cat(gathered, dim=axis) if len(gathered) > 1 else here), first

    def gather_objects(self, thing: Any) -> list[Any]:
        """Returns the objects of all workers, which `wire` must support. Tensors are on the host.

        A single worker gets its own object.
        """
        if not self.are_many:
            return [thing]
        refusal = ""
        try:
            text, data = write(thing)
        except UnsupportedError as error:
            refusal, (text, data) = str(error), write(None)
        told = list(map(json.loads, gather_texts(self.communicator, json.dumps([refusal, text]))))
        for rank, (refused, _) in enumerate(told):
            if refused:
                raise UnsupportedError(f"Worker {rank} cannot go on. {refused}")
        texts = [text for _, text in told]
        has_tensors = any(map(num_bytes, texts))
        gathered = self.gather(data) if has_tensors else [data] * len(texts)
        return [read(text, data) for text, data in zip(texts, gathered, strict=True)]
