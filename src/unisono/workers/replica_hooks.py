"""Communication hooks that see replicas instead of workers, so all layouts have the same bits.

With `num_replicas`, a hook is called for each replica, with the gradients and the state of that
replica. The ranks of its process group are the replicas of all workers, and sums over them have the
order of the tree. On a worker, the hooks of its replicas run in turn: each until it needs what the
others bring.

In an elastic job, hooks go on after a loss. At the end of a run, each worker gives an equal part of
what its replicas keep to each other worker. If a worker is lost, the others put the parts together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unisono.communicators import Communicator
from unisono.communicators.wire import gather_objects, num_bytes, read, write
from unisono.engines import OneByOne, ReplicaMeeting, ReplicaThreads
from unisono.errors import UnsupportedError
from unisono.hooks import GradBucket, WorkersGroup
from unisono.hooks.contents import content_of, restored
from unisono.hooks.hook import CommHook, HookFunction
from unisono.workers.across import AcrossWorkers
from unisono.workers.replica_ranks import ReplicaRank

# By the number of a replica, what its hook keeps; see `unisono.hooks.contents`.
Contents = dict[int, Any]


class Kept(NamedTuple):
    """What a worker has of what hooks keep between two runs.

    Attributes:
        own: By replica, what it keeps.
        texts: By replica, the same without the bytes of tensors; of all replicas.
        parts: By the number of another worker, a part of the bytes of what its replicas keep.
        replicas: By the number of a worker, its replicas. Empty if `own` has all replicas.
    """

    own: Contents
    texts: list[str]
    parts: dict[int, Tensor]
    replicas: dict[int, range]

    @classmethod
    def of_all(cls, contents: Contents) -> Kept:
        """What a worker has that knows what all replicas keep."""
        return cls(contents, [], {}, {})


def told(
    communicator: Communicator, numbers: Sequence[int], ranges: Sequence[range], own: Contents
) -> Kept:
    """Gives other workers what the replicas of this worker keep. All workers call it.

    `numbers` are the workers, by rank, and `ranges` their replicas.
    """
    written = [write(content) for content in own.values()]
    texts = gather_objects(communicator, [text for text, _ in written])
    data = torch.cat([torch.empty(0, dtype=torch.uint8), *(one for _, one in written)])
    size, rank = communicator.size, communicator.rank
    most = max(sum(map(num_bytes, of_worker)) for of_worker in texts)
    parts = [torch.empty(0, dtype=torch.uint8)] * size
    if size > 1 and most > 0:
        room = -(-most // (size - 1))
        padded = torch.zeros((size - 1) * room, dtype=torch.uint8)
        padded[: len(data)] = data
        given = list(padded.split(room))
        # A worker need not give itself a part.
        given.insert(rank, torch.zeros_like(given[0]))
        parts = communicator.all_to_all(torch.cat(given))
    of_all = [text for of_worker in texts for text in of_worker]
    parts_of = dict(zip(numbers, parts, strict=True))
    return Kept(own, of_all, parts_of, dict(zip(numbers, ranges, strict=True)))


def exchanged(
    communicator: Communicator, numbers: Sequence[int], kept: Kept | None
) -> Contents | None:
    """Returns what the hooks of all replicas keep, or None if that is nothing. All workers call it.

    `kept` is what this worker has. Raises if several workers were lost at once.
    """
    mine: Any = None
    if kept is not None:
        parts = {number: one for number, one in kept.parts.items() if number not in numbers}
        replicas = {number: (own.start, own.stop) for number, own in kept.replicas.items()}
        mine = kept.own, kept.texts, parts, replicas
    found: Contents = {}
    lost: dict[int, dict[int, Tensor]] = {}
    texts: list[str] = []
    replicas = {}
    for number, one in zip(numbers, gather_objects(communicator, mine), strict=True):
        if one is not None:
            own, its_texts, parts, its_replicas = one
            found |= own
            texts, replicas = its_texts or texts, its_replicas or replicas
            for other, part in parts.items():
                lost.setdefault(other, {})[number] = part
    for number, parts in lost.items():
        missing = [replica for replica in range(*replicas[number]) if replica not in found]
        others = [other for other in replicas if other != number]
        total = sum(num_bytes(texts[replica]) for replica in missing)
        if total and not set(others) <= parts.keys():
            raise UnsupportedError(
                "Several workers were lost at once, and only they had what the communication hook "
                f"keeps for replica {missing[0]}. Start again from a checkpoint."
            )
        nothing = torch.empty(0, dtype=torch.uint8)
        data = torch.cat([parts[other] for other in others]) if total else nothing
        for replica in missing:
            found[replica] = read(texts[replica], data)
            data = data[num_bytes(texts[replica]) :]
    return found or None


class ReplicaHooks:
    """A hook for each replica of this worker.

    The first replica uses the `state` that the program has registered, and the others have copies.
    The `function` may be an object with a state, too.
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
        """Returns the gradients of bucket `index`, reduced over the replicas of all workers.

        The `buffers` are the gradients of each replica of this worker.
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

        The `numbers` are the workers, by rank.
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

        `is_ahead` says that the last run is complete, because another worker has passed it.
        """
        kept = self._kept if self._pending is None or not is_ahead else self._pending
        self.take(exchanged(communicator, numbers, kept))

    def take(self, of_all: Contents | None) -> None:
        """Makes the hooks go on, from the next layout, with what those of all replicas keep."""
        if of_all is not None:
            self._kept = Kept.of_all(of_all)
        self._pending = None


# What gradients pass through, if the program has said so.
Hook: TypeAlias = "CommHook | ReplicaHooks"


def _are_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal, also where they have no number."""
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))
