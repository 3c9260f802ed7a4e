"""The replicas of all workers as the ranks of collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.communicators import Communicator, slice_of
from unisono.communicators.delegating import DelegatingCommunicator
from unisono.engines import ReplicaMeeting
from unisono.errors import UnsupportedError
from unisono.options import ReduceOp
from unisono.workers.across import AcrossWorkers

T = TypeVar("T")


class ReplicaRank(DelegatingCommunicator):
    """One replica of this worker, as a rank among the replicas of all workers.

    The replicas of a worker meet in each collective, and the worker does it for all of them.
    In a block of `meeting_at`, `failure` is what went wrong in a collective, if something did.
    """

    def __init__(self, across: AcrossWorkers, local_id: int) -> None:
        super().__init__(across.communicator)
        self._across = across
        self._layout = across.layout
        self._local_id = local_id
        self.rank, self.size = self._layout.own[local_id], self._layout.total
        self.cost = None
        self.failure: BaseException | None = None
        self._meeting: ReplicaMeeting | None = None

    @contextmanager
    def meeting_at(self, meeting: ReplicaMeeting) -> Iterator[None]:
        """In the block, the replicas of this worker meet there."""
        self._meeting = meeting
        try:
            yield
        finally:
            # The frames of the error hold what was used in them.
            self._meeting = self.failure = None

    def _meet(self, what: str, given: T, work: Callable[[list[T]], Sequence[Any]]) -> Any:
        assert self._meeting is not None
        try:
            return self._meeting.meet(self._local_id, what, given, work)
        except BaseException as error:
            self.failure = error
            raise

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        if len(terms) > 1 or count not in (None, self.size):
            raise UnsupportedError(
                f"A hook of a replica reduced {len(terms)} tensors at once. Reduce one at a time."
            )

        def reduce(given: list[Tensor]) -> list[Tensor]:
            return [self._across.reduce_each(op, given)] * len(given)

        what = f"all_reduce with {op} of {_in_words(terms[0])}"
        terms[0].copy_(self._meet(what, terms[0].detach(), reduce))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        def gather(given: list[Tensor]) -> list[list[Tensor]]:
            return [self._across.gather_each(given)] * len(given)

        found = self._meet("all_gather", tensor.detach(), gather)
        return [one.to(tensor.device, copy=True) for one in found]

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        self.check_root(root)
        found = self.all_gather(tensor)
        return found if self.rank == root else None

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        flat = tensor.detach().reshape(-1)
        found: list[Tensor] = self._meet(f"all_to_all of {_in_words(flat)}", flat, self._exchange)
        return [one.to(tensor.device, copy=True) for one in found]

    def _exchange(self, given: list[Tensor]) -> list[list[Tensor]]:
        """Returns what all replicas have for each replica of this worker."""
        length, ranges = len(given[0]), self._layout.ranges
        # What a replica has for those of a worker is in one piece.
        spans = [
            slice(
                slice_of(own.start, self.size, length).start,
                slice_of(own.stop - 1, self.size, length).stop,
            )
            for own in ranges
        ]
        most = max(one.stop - one.start for one in spans) * max(map(len, ranges))
        place = self._across.place(given[0].device)
        message = given[0].new_zeros(len(ranges), most, device=place)
        for row, span in zip(message, spans, strict=True):
            pieces = torch.cat([one[span] for one in given])
            row[: len(pieces)] = pieces
        received = self._across.communicator.all_to_all(message.view(-1))
        mine = spans[self._layout.rank]
        width = mine.stop - mine.start
        pieces_of_all = [
            one[i * width : (i + 1) * width]
            for one, own in zip(received, ranges, strict=True)
            for i in range(len(own))
        ]
        parts = [slice_of(number, self.size, length) for number in self._layout.own]
        return [
            [piece[part.start - mine.start : part.stop - mine.start] for piece in pieces_of_all]
            for part in parts
        ]

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check_root(root)

        def share(given: list[Tensor]) -> list[Tensor]:
            owner = next(i for i, own in enumerate(self._layout.ranges) if root in own)
            is_here = owner == self._layout.rank
            source = given[root - self._layout.own.start if is_here else 0]
            sent = source.to(self._across.place(source.device), copy=True)
            self._across.communicator.broadcast(sent, owner)
            return [sent] * len(given)

        what = f"broadcast from {root} of {_in_words(tensor)}"
        tensor.detach().copy_(self._meet(what, tensor.detach(), share))

    def barrier(self) -> None:
        def wait(given: list[None]) -> list[None]:
            self._across.communicator.barrier()
            return given

        self._meet("barrier", None, wait)

    # Made of the above, or without the workers.
    reduce_scatter = Communicator.reduce_scatter
    allocate = Communicator.allocate

    def close(self) -> None:
        """Leaves nothing: the workers stay connected."""


def _in_words(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
