"""The base of communicators that stand before another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator
from unisono.options import ReduceOp


class DelegatingCommunicator(Communicator):
    """Lets another communicator do everything. Subclasses override what they do themselves.

    Args:
        carrier: Does the work; closed with this communicator.
    """

    def __init__(self, carrier: Communicator) -> None:
        super().__init__(carrier.rank, carrier.size)
        self.cost = carrier.cost
        self.timeout_seconds = carrier.timeout_seconds
        self._carrier = carrier

    @property
    def name(self) -> str:
        """In words, what carries the collectives."""
        return self._carrier.name

    def takes(self, device: torch.device) -> bool:
        """Returns whether tensors on `device` can be given."""
        return self._carrier.takes(device)

    def keeps_order(self, tensor: Tensor) -> bool:
        """Returns whether sums of tensors like this one follow the order of the whole library."""
        return self._carrier.keeps_order(tensor)

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        """Combines all terms of all ranks into the first term of each rank."""
        self._carrier.all_reduce(op, terms, count)

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        """Combines all terms, and returns the part of this rank in the flattened result."""
        return self._carrier.reduce_scatter(op, terms, count)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, by rank."""
        return self._carrier.all_gather(tensor)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Returns the tensors of all ranks on `root`, and None elsewhere."""
        return self._carrier.gather(tensor, root)

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        """Gives every rank its part of a tensor, and returns this rank's part of each, by rank."""
        return self._carrier.all_to_all(tensor)

    def share_parts(self, tensor: Tensor) -> None:
        """Overwrites each part of the contiguous `tensor` with what the rank of the part has."""
        self._carrier.share_parts(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites the contiguous `tensor` with that of `root`."""
        self._carrier.broadcast(tensor, root)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._carrier.barrier()

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns bytes from which collectives need not copy. All ranks ask for the same number."""
        return self._carrier.allocate(num_bytes)

    def set_timeout(self, seconds: float) -> None:
        """Sets how long collectives may wait for others from now on."""
        self._carrier.set_timeout(seconds)

    def check_health(self) -> None:
        """Raises a `CommunicationError` if a rank is lost. Other ranks need not call it."""
        self._carrier.check_health()

    def close(self) -> None:
        """Leaves, and gives back memory, connections and threads. May be called twice."""
        self._carrier.close()
