"""The base of communicators that stand before another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator
from unisono.options import ReduceOp

T = TypeVar("T")


class DelegatingCommunicator(Communicator):
    """Lets another communicator do everything. Subclasses override what they do themselves."""

    def __init__(self, carrier: Communicator) -> None:
        super().__init__(carrier.rank, carrier.size)
        self.cost = carrier.cost
        self.timeout_seconds = carrier.timeout_seconds
        self._carrier = carrier

    @property
    def name(self) -> str:
        return self._carrier.name

    def takes(self, device: torch.device) -> bool:
        return self._carrier.takes(device)

    def keeps_order(self, tensor: Tensor) -> bool:
        return self._carrier.keeps_order(tensor)

    def _call(
        self, kind: str, tensors: Sequence[Tensor], op: ReduceOp | None, call: Callable[[], T]
    ) -> T:
        """Makes a collective of the carrier. Subclasses may do something around it."""
        return call()

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        self._call("all_reduce", terms, op, lambda: self._carrier.all_reduce(op, terms, count))

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        call = partial(self._carrier.reduce_scatter, op, terms, count)
        return self._call("reduce_scatter", terms, op, call)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._call("all_gather", (tensor,), None, lambda: self._carrier.all_gather(tensor))

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        return self._call("gather", (tensor,), None, lambda: self._carrier.gather(tensor, root))

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        return self._call("all_to_all", (tensor,), None, lambda: self._carrier.all_to_all(tensor))

    def share_parts(self, tensor: Tensor) -> None:
        self._call("share_parts", (tensor,), None, lambda: self._carrier.share_parts(tensor))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self._call("broadcast", (tensor,), None, lambda: self._carrier.broadcast(tensor, root))

    def barrier(self) -> None:
        self._call("barrier", (), None, self._carrier.barrier)

    def allocate(self, num_bytes: int) -> Tensor:
        return self._carrier.allocate(num_bytes)

    def set_timeout(self, seconds: float) -> None:
        self._carrier.set_timeout(seconds)

    def check_health(self) -> None:
        self._carrier.check_health()

    def close(self) -> None:
        self._carrier.close()
