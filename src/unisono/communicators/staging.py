"""GPU tensors through communicators that know host memory alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.communicators.delegating import DelegatingCommunicator
from unisono.options import ReduceOp


class StagedCommunicator(DelegatingCommunicator):
    """Copies GPU tensors to pinned host memory, lets another communicator work, and copies back."""

    @property
    def name(self) -> str:
        return f"{self._carrier.name}, GPU tensors through host memory"

    def takes(self, device: torch.device) -> bool:
        """Host memory and GPUs."""
        return device.type == "cuda" or self._carrier.takes(device)

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        staged = [_staged(term) for term in terms]
        self._carrier.all_reduce(op, staged, count)
        _copy_back(staged[0], terms[0])

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        part = self._carrier.reduce_scatter(op, [_staged(term) for term in terms], count)
        return part.to(terms[0].device)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [one.to(tensor.device) for one in self._carrier.all_gather(_staged(tensor))]

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        gathered = self._carrier.gather(_staged(tensor), root)
        return None if gathered is None else [one.to(tensor.device) for one in gathered]

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        return [one.to(tensor.device) for one in self._carrier.all_to_all(_staged(tensor))]

    def share_parts(self, tensor: Tensor) -> None:
        staged = _staged(tensor)
        self._carrier.share_parts(staged)
        _copy_back(staged, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        staged = _staged(tensor)
        self._carrier.broadcast(staged, root)
        _copy_back(staged, tensor)


def _staged(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    # A copy from the GPU into pinned memory need not pass through a buffer of the driver.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach())


def _copy_back(staged: Tensor, tensor: Tensor) -> None:
    if staged is not tensor:
        tensor.detach().copy_(staged)
