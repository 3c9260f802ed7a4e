"""Communication hooks that see replicas instead of workers, so all layouts have the same bits.

With `num_replicas`, a hook is called for each replica, with the gradients and the state of that
replica. The ranks of its process group are the replicas of all workers, and sums over them have the
order of the tree. On a worker, the hooks of its replicas run in turn: each until it needs what the
others bring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from unisono.communicators import Communicator
from unisono.engines import OneByOne, ReplicaMeeting, ReplicaThreads
from unisono.errors import UnsupportedError
from unisono.gradients.kept_hooks import Contents, Kept, exchanged, told
from unisono.gradients.replica_ranks import ReplicaRank
from unisono.hooks import GradBucket, WorkersGroup
from unisono.hooks.contents import content_of, restored
from unisono.hooks.hook import CommHook, HookFunction
from unisono.reductions import AcrossWorkers


class ReplicaHooks:
    """A hook for each replica of this worker.

    Args:
        state: What the program has registered. The first replica of the worker uses it, and the
            others have copies.
        function: The hook itself, which may be an object with a state, too.
        group: The process group that the hook uses.
    """

    def __init__(self, state: object, function: HookFunction, group: WorkersGroup) -> None:
        self._given: Any = state, function
        self._group = group
        CommHook(state, function, "")  # Raises if it cannot be one.
        self._first = content_of(self._given)
        self._hooks: list[CommHook] = []
        self._has_run = False
        # In an elastic job: after the last complete run, and after one that may be undone.
        self._kept: Kept | None = None
        self._pending: Kept | None = None
        self._threads: ReplicaThreads | None = None

    def lay_out(self, across: AcrossWorkers, place: torch.device) -> None:
        """Makes the hooks of the replicas that this worker has from now on, on a device."""
        self.close()
        self._across = across
        self._place = across.place(place)
        numbers = across.layout.own
        self._names = [f"replica {number}" for number in numbers]
        self._ranks = [ReplicaRank(across, i) for i in range(len(numbers))]
        self._threads = ReplicaThreads(len(numbers), 1)
        self.restore()

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.close()

    def restore(self) -> None:
        """Lets the hooks go on from the last complete run."""
        self._pending, self._has_run = None, False
        kept = self._kept
        # What has come from another worker is in host memory.
        place = None if kept is None or kept.replicas else self._place
        self._live = [
            restored(
                self._given,
                self._first if kept is None else kept.own[number],
                place,
                # The program can look at what it has registered.
                in_place=i == 0,
            )
            for i, number in enumerate(self._across.layout.own)
        ]

    def __call__(
        self, index: int, buffers: Sequence[Tensor], parameters: Sequence[Tensor], *, is_last: bool
    ) -> Tensor:
        """Returns the gradients of a bucket, reduced over the replicas of all workers.

        Args:
            index: The number of the bucket.
            buffers: The gradients of each replica of this worker.
            parameters: Their parameters.
            is_last: Whether no other bucket of this backward pass follows.
        """
        assert self._threads is not None
        self._has_run = True
        meeting = ReplicaMeeting(len(buffers), OneByOne(len(buffers)), names=self._names)
        buckets = [GradBucket(index, one, parameters, is_last=is_last) for one in buffers]
        calls = [self._call(i, meeting, bucket) for i, bucket in enumerate(buckets)]
        first, *others = self._threads.run(calls, meeting)
        if not all(map(functools.partial(_are_same_bits, first), others)):
            raise UnsupportedError(
                "A communication hook returned different gradients for two replicas, which share "
                "their parameters. Return the mean over all ranks of the process group."
            )
        result: Tensor = first
        return result

    def _call(self, i: int, meeting: ReplicaMeeting, bucket: GradBucket) -> Callable[[], Any]:
        rank, place = self._ranks[i], bucket.buffer().device
        state, function = self._live[i]
        hook = CommHook(state, function, self._names[i])

        def reduce() -> Tensor:
            with (
                rank.meeting_at(meeting),
                self._group.standing_for(rank),
                torch.no_grad(),
                torch.cuda.device(place) if place.type == "cuda" else nullcontext(),
            ):
                try:
                    return hook(bucket)
                except Exception:
                    # A future of torch raises another error than its callback did.
                    if rank.failure is not None:
                        raise rank.failure from None
                    raise

        return lambda: meeting.attend(i, reduce)

    def tell(self, numbers: Sequence[int]) -> None:
        """At the end of a run of an elastic job: gives other workers what the hooks keep.

        Args:
            numbers: The numbers of the workers, by rank.
        """
        if self._has_run:
            ranges = self._across.layout.ranges
            self._pending = told(self._across.communicator, numbers, ranges, self.contents())

    def commit(self) -> None:
        """When that run is complete."""
        if self._pending is not None:
            self._kept, self._pending, self._has_run = self._pending, None, False

    @property
    def kept_for(self) -> str:
        """How many replicas have a hook, in words."""
        return f"{self._across.layout.total} replicas"

    def contents(self) -> Contents:
        """Returns what the hooks of this worker keep now, by replica."""
        return dict(zip(self._across.layout.own, map(content_of, self._live), strict=True))

    def load(self, contents: Contents) -> None:
        """Goes on with what the hooks of all replicas kept."""
        self.take(contents)
        self.restore()

    @property
    def are_known(self) -> bool:
        """Whether this worker has what the hooks of all replicas keep."""
        return self._kept is None or not self._kept.replicas

    def meet(
        self, communicator: Communicator, numbers: Sequence[int], *, is_ahead: bool = False
    ) -> None:
        """When workers come or go: all get what the hooks of all replicas keep.

        Args:
            communicator: Connects them.
            numbers: Their numbers, by rank.
            is_ahead: Whether the last run is complete, because another worker has passed it.
        """
        kept = self._kept if self._pending is None or not is_ahead else self._pending
        self.take(exchanged(communicator, numbers, kept))

    def take(self, of_all: Contents | None) -> None:
        """Makes the hooks go on, from the next layout, with what those of all replicas keep."""
        if of_all is not None:
            self._kept = Kept.of_all(of_all)
        self._pending = None


def _are_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal, also where they have no number."""
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))
