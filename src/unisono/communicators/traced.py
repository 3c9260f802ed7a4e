"""Collectives that are recorded, each with a number by which the workers' traces are matched."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.communicators.communicator import Communicator
from unisono.communicators.delegating import DelegatingCommunicator
from unisono.options import ReduceOp
from unisono.tracing import Span, span


class TracedCommunicator(DelegatingCommunicator):
    """Another communicator, whose collectives are recorded while somebody records."""

    def __init__(self, carrier: Communicator, group: int) -> None:
        super().__init__(carrier)
        self.group = group
        # Counted when nobody records too: workers may start to record at different times.
        self._number = 0

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        with self._span("all_reduce", terms, op):
            super().all_reduce(op, terms, count)

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        with self._span("reduce_scatter", terms, op):
            return super().reduce_scatter(op, terms, count)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        with self._span("all_gather", (tensor,)):
            return super().all_gather(tensor)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        with self._span("gather", (tensor,)):
            return super().gather(tensor, root)

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        with self._span("all_to_all", (tensor,)):
            return super().all_to_all(tensor)

    def share_parts(self, tensor: Tensor) -> None:
        with self._span("share_parts", (tensor,)):
            super().share_parts(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        with self._span("broadcast", (tensor,)):
            super().broadcast(tensor, root)

    def barrier(self) -> None:
        with self._span("barrier", ()):
            super().barrier()

    def _span(self, kind: str, tensors: Sequence[Tensor], op: ReduceOp | None = None) -> Span:
        self._number += 1
        return span("collective", kind, tensors, op=op, group=self.group, number=self._number)
