"""Who sends what to whom between the devices of a process: an algorithm as data, and its plan.

A schedule speaks of *places*. Places 0 to P - 1 are the replicas' devices; further places are
devices that hold no value yet, such as a separate destination.

    Gather(root, members)   the root receives all that the members hold, to combine it
    Spread(root, members)   the root's result is copied to the members

A plan is a schedule on given memories, as copies between them and sums inside them. A place that
gathers values keeps them as *nodes* of the one tree that orders every sum (see
`unisono.kernels.tree`). It combines nodes only when they leave for another memory, or when all are
there. So every schedule gives the same bits, places that share a memory exchange nothing, and a
schedule inside one memory is a single sum. `run` does a plan on tensors, and only this code moves
values between memories.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from unisono.algorithms.nodes import Node, children, merged
from unisono.kernels import divide, reduce_batch, undivided, wide_dtype
from unisono.options import ReduceOp
from unisono.tracing import span


class Gather(NamedTuple):
    """Sends the values of the places `members` to the place `root`, which sums them."""

    root: int
    members: tuple[int, ...]


class Spread(NamedTuple):
    """Sends a result from the place `root` to the places `members`."""

    root: int
    members: tuple[int, ...]


Move: TypeAlias = Gather | Spread
Schedule: TypeAlias = tuple[Move, ...]


def num_transfers(schedule: Schedule) -> int:
    """Returns how many tensors a `schedule` moves, when partial sums are combined on the way."""
    return sum(len(move.members) for move in schedule)


def num_steps(schedule: Schedule) -> int:
    """Returns how many moves must follow each other. Other moves overlap."""
    ready: dict[int, int] = {}
    for move in schedule:
        places = (move.root, *move.members)
        step = max(ready.get(place, 0) for place in places) + 1
        ready.update(dict.fromkeys(places, step))
    return max(ready.values(), default=0)


def without(places: Sequence[int], place: int) -> tuple[int, ...]:
    """Returns `places` without `place`, in the same order."""
    return tuple(other for other in places if other != place)


def one_device(num_replicas: int, *, root: int = 0, destinations: Sequence[int]) -> Schedule:
    """Gathers the replicas' values on `root` and spreads the result to `destinations`.

    transfers   (P - 1) in, (D - 1) out, all of them through the root
    steps       2
    """
    return (
        Gather(root, without(range(num_replicas), root)),
        Spread(root, without(destinations, root)),
    )


def two_level(groups: Sequence[Sequence[int]], *, turn: int = 0) -> Schedule:
    """All-reduces over `groups`; with each `turn` the roots move on to the next device.

    group 0       group 1
    0 1 2 3       4 5 6 7
     \\|/           \\|/          members to the root of their group
      0 <---------- 4           roots to the first root, which has the result
      0 ----------> 4           the result to the other roots
     /|\\           /|\\          roots to the members of their group

    transfers   2 (P - 1), of which 2 (G - 1) between groups
    steps       4
    """
    order = sorted(place for group in groups for place in group)
    first = order[turn % len(order)]
    roots = [first if first in group else group[turn % len(group)] for group in groups]
    other_roots = without(roots, first)
    inside = [(root, without(group, root)) for root, group in zip(roots, groups, strict=True)]
    return (
        *(Gather(root, members) for root, members in inside if members),
        *((Gather(first, other_roots), Spread(first, other_roots)) if other_roots else ()),
        *(Spread(root, members) for root, members in inside if members),
    )


class Copy(NamedTuple):
    """Copies a buffer to the memory of `place`, as another buffer."""

    source: int
    target: int
    place: int


class Combine(NamedTuple):
    """Combines buffers of one memory, and writes the result to each target.

    Attributes:
        is_result: Whether this is the reduction's result, and not a part of it.
        is_whole: Whether the sources are the replicas' own values, all of them.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    is_result: bool
    is_whole: bool


Step: TypeAlias = Copy | Combine


@dataclass(frozen=True)
class Plan:
    """`steps` over buffers, of which buffer i < `num_replicas` is the value of replica i.

    Each destination gets one of the buffers `outputs`.
    """

    num_replicas: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    @functools.cached_property
    def num_copies(self) -> int:
        """The number of tensors copied between memories."""
        return sum(isinstance(step, Copy) for step in self.steps)

    @functools.cached_property
    def is_one_sum(self) -> bool:
        """Whether the plan is one sum of all values inside one memory."""
        return len(self.steps) == 1 and isinstance(self.steps[0], Combine)

    def run(
        self, op: ReduceOp, batch: Sequence[Sequence[Tensor]], places: Sequence[torch.device]
    ) -> list[tuple[Tensor, ...]]:
        """Reduces each item of `batch` by `op`; `places` are the torch devices of the places."""
        return run(self, op, batch, places)


@functools.lru_cache(maxsize=1024)
def make_plan(
    schedule: Schedule,
    num_replicas: int,
    memories: tuple[Hashable, ...],
    destinations: tuple[int, ...],
) -> Plan:
    """Turns a schedule into sums and copies.

    Args:
        schedule: Who sends what to whom.
        num_replicas: How many values are combined; they are at the first places.
        memories: The memory of each place. Inside one memory nothing is copied.
        destinations: The places that get the result.
    """
    return _Planner(num_replicas, memories).plan(schedule, destinations)


@dataclass
class _Planner:
    num_replicas: int
    memories: tuple[Hashable, ...]
    steps: list[Step] = field(default_factory=list)
    num_buffers: int = 0
    # The nodes that each place holds, the buffer of each node in each memory that has it in one,
    # and that of the result.
    held: dict[int, list[Node]] = field(default_factory=dict)
    buffers: dict[tuple[Hashable, Node], int] = field(default_factory=dict)
    results: dict[Hashable, int] = field(default_factory=dict)

    def plan(self, schedule: Schedule, destinations: tuple[int, ...]) -> Plan:
        for i in range(self.num_replicas):
            self.held[i] = [(i, i + 1)]
            self.buffers[self.memories[i], (i, i + 1)] = self._new_buffer()
        for move in schedule:
            if isinstance(move, Gather):
                self._gather(move)
                continue
            self._finish(move.root)
            for member in move.members:
                if self.memories[member] not in self.results:
                    source = self.results[self.memories[move.root]]
                    self.results[self.memories[member]] = self._copy(source, member)
        if len(self.held) == 1:
            self._finish(next(iter(self.held)))
        outputs = self._outputs(destinations)
        return Plan(self.num_replicas, tuple(self.steps), outputs)

    def _new_buffer(self) -> int:
        self.num_buffers += 1
        return self.num_buffers - 1

    def _copy(self, source: int, place: int) -> int:
        target = self._new_buffer()
        self.steps.append(Copy(source, target, place))
        return target

    def _gather(self, move: Gather) -> None:
        """Brings the members' nodes to the root, memory by memory, combined before a copy."""
        by_memory: dict[Hashable, list[Node]] = {}
        for member in move.members:
            by_memory.setdefault(self.memories[member], []).extend(self.held.pop(member, []))
        here, at_root = self.memories[move.root], self.held.setdefault(move.root, [])
        for memory, nodes in by_memory.items():
            if memory != here:
                nodes = list(merged(nodes, self.num_replicas))
                for node, buffer in [(node, self._combine(memory, node)) for node in nodes]:
                    self.buffers[here, node] = self._copy(buffer, move.root)
            at_root += nodes

    def _finish(self, root: int) -> None:
        if root in self.held and not self.results:
            (total,) = merged(self.held[root], self.num_replicas)
            self.results[self.memories[root]] = self._combine(self.memories[root], total)

    def _combine(self, memory: Hashable, node: Node) -> int:
        """Returns the buffer of a node in a memory, after steps that combine it if need be."""
        buffer = self.buffers.get((memory, node))
        # The value of a single replica must still be combined, to become a result.
        if buffer is not None and (self.num_replicas > 1 or buffer > 0):
            return buffer
        values = [self.buffers.get((memory, (i, i + 1))) for i in range(*node)]
        own = tuple(value for value in values if value is not None)
        is_whole = len(own) == len(values)
        if not is_whole:
            own = tuple(self._combine(memory, child) for child in children(node))
        target = self._new_buffer()
        is_result = len(values) == self.num_replicas
        self.steps.append(Combine(own, (target,), is_result, is_whole))
        return target

    def _outputs(self, destinations: tuple[int, ...]) -> tuple[int, ...]:
        """Gives each destination its own buffer, so that changing one does not change another."""
        taken: set[int] = set()
        outputs = []
        for place in destinations:
            buffer = self.results[self.memories[place]]
            outputs.append(self._twin(buffer, place) if buffer in taken else buffer)
            taken.add(buffer)
        return tuple(outputs)

    def _twin(self, buffer: int, place: int) -> int:
        """Returns another buffer with the same content: written by the same sum, or copied."""
        for i, step in enumerate(self.steps):
            if isinstance(step, Combine) and buffer in step.targets:
                target = self._new_buffer()
                self.steps[i] = step._replace(targets=(*step.targets, target))
                return target
        return self._copy(buffer, place)


def run(
    plan: Plan, op: ReduceOp, batch: Sequence[Sequence[Tensor]], places: Sequence[torch.device]
) -> list[tuple[Tensor, ...]]:
    """Reduces each item of `batch`, one tensor per replica, and returns one per destination.

    The inputs are not changed, and every returned tensor has its own memory.
    """
    if not batch:
        return []
    if plan.is_one_sum:
        return reduce_batch(op, batch, [len(plan.outputs)] * len(batch))
    held: dict[int, Sequence[Tensor]] = dict(enumerate(zip(*batch, strict=True)))
    dtypes = [item[0].dtype for item in batch]
    for step in plan.steps:
        if isinstance(step, Copy):
            with span("copy", "copy", held[step.source], to=places[step.place]):
                # Between GPUs without peer access, CUDA copies through host memory.
                held[step.target] = [
                    tensor.detach().to(places[step.place], copy=True)
                    for tensor in held[step.source]
                ]
        else:
            items = list(zip(*(held[source] for source in step.sources), strict=True))
            written = _combined(step, op, items, dtypes, plan.num_replicas)
            held.update(zip(step.targets, zip(*written, strict=True), strict=True))
    return list(zip(*(held[output] for output in plan.outputs), strict=True))


def _combined(
    step: Combine,
    op: ReduceOp,
    items: Sequence[tuple[Tensor, ...]],
    dtypes: Sequence[torch.dtype],
    num_replicas: int,
) -> list[tuple[Tensor, ...]]:
    """Combines values or partial results; partial results stay wide, and are not divided."""
    if step.is_result and step.is_whole:
        return reduce_batch(op, items, [len(step.targets)] * len(items))
    part_op = undivided(op)
    wide = [tuple(part.to(wide_dtype(part.dtype)) for part in parts) for parts in items]
    totals = reduce_batch(part_op, wide, [1] * len(items))
    if not step.is_result:
        return totals
    results = [
        divide(total, num_replicas, dtype) if op is ReduceOp.MEAN else total.to(dtype)
        for (total,), dtype in zip(totals, dtypes, strict=True)
    ]
    return [(result, *(result.clone() for _ in step.targets[1:])) for result in results]
