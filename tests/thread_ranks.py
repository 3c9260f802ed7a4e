"""Ranks as threads of one process.

Every collective is one meeting: each rank lays down what it brings, the last to come does the work
for all, and everybody takes its result. The other communicators do the same with more machinery.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator, slice_of
from unisono.communicators.headers import Header, check_agreement, ranks_in_words
from unisono.errors import CommunicationError, WorkerLostError, WorkerTimeoutError
from unisono.kernels import combine_into
from unisono.options import ReduceOp

Work = Callable[[list[Sequence[Tensor]]], list[Any]]


def make_threads(size: int, *, timeout_seconds: float = 300.0) -> list[ThreadCommunicator]:
    """Returns the communicators of `size` ranks, each to be used by one thread."""
    table = _Table(size, timeout_seconds)
    return [ThreadCommunicator(table, rank) for rank in range(size)]


class ThreadCommunicator(Communicator):
    """One of several ranks that are threads of one process. Made by `make_threads`."""

    def __init__(self, table: _Table, rank: int) -> None:
        super().__init__(rank, table.size)
        self.timeout_seconds = table.timeout_seconds
        self._table = table
        self._sequence = 0

    name = "threads of one process"

    def takes(self, device: torch.device) -> bool:
        """Every device, as long as all ranks use the same one."""
        return True

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        """Combines all terms of all ranks into the first term of each rank."""

        def reduce(brought: list[Sequence[Tensor]]) -> list[None]:
            every_term = [term for terms in brought for term in terms]
            combine_into(op, every_term, [terms[0] for terms in brought], count)
            return [None] * self.size

        header = Header.of_terms("all_reduce", self._next(), op, terms, count)
        self._table.meet(self.rank, header, terms, reduce)

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        """Combines all terms, and returns the part of this rank in the flattened result."""

        def reduce(brought: list[Sequence[Tensor]]) -> list[Tensor]:
            total = torch.empty_like(brought[0][0]).view(-1)
            combine_into(op, [t.view(-1) for terms in brought for t in terms], [total], count)
            parts = [slice_of(rank, self.size, len(total)) for rank in range(self.size)]
            return [total[part].clone() for part in parts]

        header = Header.of_terms("reduce_scatter", self._next(), op, terms, count)
        part: Tensor = self._table.meet(self.rank, header, terms, reduce)
        return part

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, by rank."""
        header = Header.of_tensor("all_gather", self._next(), tensor)
        copies: list[Tensor] = self._table.meet(
            self.rank, header, [tensor], lambda brought: [_copies(brought) for _ in brought]
        )
        return copies

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Returns the tensors of all ranks on `root`, and None elsewhere."""
        self.check_root(root)
        header = Header.of_tensor("gather", self._next(), tensor, root)
        copies: list[Tensor] | None = self._table.meet(
            self.rank,
            header,
            [tensor],
            lambda brought: [
                _copies(brought) if rank == root else None for rank in range(self.size)
            ],
        )
        return copies

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites the contiguous `tensor` with that of `root`."""

        def copy(brought: list[Sequence[Tensor]]) -> list[None]:
            for (other,) in brought:
                other.copy_(brought[root][0])
            return [None] * self.size

        self.check_root(root)
        header = Header.of_tensor("broadcast", self._next(), tensor, root)
        self._table.meet(self.rank, header, [tensor.detach()], copy)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._table.meet(self.rank, Header("barrier", self._next()), [], lambda brought: brought)

    def set_timeout(self, seconds: float) -> None:
        """Says how long this rank waits for others."""
        self._table.patience[self.rank] = seconds

    @property
    def patience(self) -> float:
        """How long this rank waits for others now."""
        return self._table.patience.get(self.rank, self._table.timeout_seconds)

    def check_health(self) -> None:
        """Raises if a rank has closed its communicator, or a collective has failed."""
        self._table.check_health()

    def close(self) -> None:
        """Leaves. Ranks that wait for this one raise at once."""
        self._table.leave(self.rank)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence


def _copies(brought: list[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor.detach().clone() for (tensor,) in brought]


class _Table:
    """Where the ranks meet. One meeting ends before the next begins."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        # How long each rank waits, where it is not as long.
        self.patience: dict[int, float] = {}
        self._changed = threading.Condition()
        self._headers: dict[int, Header] = {}
        self._brought: dict[int, Sequence[Tensor]] = {}
        self._results: list[Any] = []
        self._num_meetings = 0
        self._gone: set[int] = set()
        self._failure: Exception | None = None

    def meet(self, rank: int, header: Header, tensors: Sequence[Tensor], work: Work) -> Any:
        """Waits until every rank has come, and returns what the work gave for this one."""
        with self._changed:
            self._raise_failure()
            meeting = self._num_meetings
            self._headers[rank] = header
            self._brought[rank] = tensors
            if len(self._headers) == self.size:
                self._finish(work)
            else:
                self._wait(header, meeting, self.patience.get(rank, self.timeout_seconds))
            return self._results[rank]

    def _finish(self, work: Work) -> None:
        try:
            check_agreement(dict(sorted(self._headers.items())))
            self._results = work([self._brought[rank] for rank in range(self.size)])
        except Exception as error:
            self._fail(error)
        self._headers, self._brought = {}, {}
        self._num_meetings += 1
        self._changed.notify_all()

    def _wait(self, header: Header, meeting: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._num_meetings == meeting:
            self._raise_failure()
            missing = [rank for rank in range(self.size) if rank not in self._headers]
            if gone := [rank for rank in missing if rank in self._gone]:
                self._fail(_left(gone, header))
            if time.monotonic() >= deadline:
                self._fail(self._late(missing, header, seconds))
            self._changed.wait(min(0.5, max(0.0, deadline - time.monotonic())))
        self._raise_failure()

    def _late(self, missing: list[int], header: Header, seconds: float) -> CommunicationError:
        return WorkerTimeoutError(
            f"Waited {seconds:g} s in {header} for {ranks_in_words(missing)} of {self.size}. Call "
            "it on every rank, or raise `timeout_seconds` if one is slow.",
            missing,
        )

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._changed.notify_all()
        raise error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def check_health(self) -> None:
        """Raises if there was a failure or a rank is gone."""
        with self._changed:
            self._raise_failure()
            if self._gone:
                raise _left(sorted(self._gone), None)

    def leave(self, rank: int) -> None:
        """Says that `rank` will not come any more."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


def _left(ranks: list[int], header: Header | None) -> WorkerLostError:
    where = "" if header is None else f" while others are in {header}"
    return WorkerLostError(
        f"{ranks_in_words(ranks)} closed the communicator{where}. Make a new one with all ranks.",
        ranks,
    )
