"""Collectives that are recorded, each with a number by which the workers' traces are matched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from unisono.communicators.communicator import Communicator
from unisono.communicators.delegating import DelegatingCommunicator
from unisono.options import ReduceOp
from unisono.tracing import span

T = TypeVar("T")


class TracedCommunicator(DelegatingCommunicator):
    """Another communicator, whose collectives are recorded while somebody records."""

    def __init__(self, carrier: Communicator, group: int) -> None:
        super().__init__(carrier)
        self.group = group
        # Counted when nobody records too: workers may start to record at different times.
        self._number = 0

    def _call(
        self, kind: str, tensors: Sequence[Tensor], op: ReduceOp | None, call: Callable[[], T]
    ) -> T:
        self._number += 1
        with span("collective", kind, tensors, op=op, group=self.group, number=self._number):
            return call()
