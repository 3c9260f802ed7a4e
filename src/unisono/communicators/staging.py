"""GPU tensors through communicators that know host memory alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator
from unisono.options import ReduceOp


class StagedCommunicator(Communicator):
    """Copies GPU tensors to pinned host memory, lets another communicator work, and copies back.

    Host tensors go to the other communicator as they are.
    """

    def __init__(self, on_host: Communicator) -> None:
        super().__init__(on_host.rank, on_host.size)
        self.timeout_seconds = on_host.timeout_seconds
        self._on_host = on_host

    @property
    def name(self) -> str:
        """In words, what carries the collectives."""
        return f"{self._on_host.name}, GPU tensors through host memory"

    def takes(self, device: torch.device) -> bool:
        """Host memory and GPUs."""
        return device.type == "cuda" or self._on_host.takes(device)

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        """Combines all terms of all ranks into the first term of each rank."""
        staged = [_staged(term) for term in terms]
        self._on_host.all_reduce(op, staged, count)
        _copy_back(staged[0], terms[0])

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        """Combines all terms, and returns the part of this rank in the flattened result."""
        part = self._on_host.reduce_scatter(op, [_staged(term) for term in terms], count)
        return part.to(terms[0].device)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, by rank."""
        return [one.to(tensor.device) for one in self._on_host.all_gather(_staged(tensor))]

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Returns the tensors of all ranks on `root`, and None elsewhere."""
        gathered = self._on_host.gather(_staged(tensor), root)
        return None if gathered is None else [one.to(tensor.device) for one in gathered]

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites the contiguous `tensor` with that of `root`."""
        staged = _staged(tensor)
        self._on_host.broadcast(staged, root)
        _copy_back(staged, tensor)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._on_host.barrier()

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns bytes from which collectives need not copy. Every rank must ask for as many."""
        return self._on_host.allocate(num_bytes)

    def set_timeout(self, seconds: float) -> None:
        """Says how long collectives of the other communicator may wait."""
        self._on_host.set_timeout(seconds)

    def check_health(self) -> None:
        """Raises a `CommunicationError` if a rank is lost. Other ranks need not call it."""
        self._on_host.check_health()

    def close(self) -> None:
        """Leaves, and gives back memory, connections and threads. May be called twice."""
        self._on_host.close()


def _staged(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    # A copy from the GPU into pinned memory need not pass through a buffer of the driver.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach())


def _copy_back(staged: Tensor, tensor: Tensor) -> None:
    if staged is not tensor:
        tensor.detach().copy_(staged)
