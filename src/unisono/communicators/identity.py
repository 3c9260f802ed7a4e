"""One rank alone: every collective gives back what was brought."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator
from unisono.communicators.headers import Header
from unisono.kernels import combine_into
from unisono.options import ReduceOp


class IdentityCommunicator(Communicator):
    """A communicator of size one, for programs that need not know whether they are alone."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    @property
    def name(self) -> str:
        return "one rank alone"

    def takes(self, device: torch.device) -> bool:
        """Every device: nothing moves."""
        return True

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        """Combines the terms of this rank into the first."""
        Header.of_terms("all_reduce", 0, op, terms, count)
        combine_into(op, terms, terms[:1], count)

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        """Returns the combination of the terms, flat."""
        Header.of_terms("reduce_scatter", 0, op, terms, count)
        result = torch.empty_like(terms[0])
        combine_into(op, terms, [result], count)
        return result.view(-1)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns a copy of the tensor."""
        return [tensor.detach().clone()]

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Returns a copy of the tensor."""
        self.check_root(root)
        return self.all_gather(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Leaves the tensor as it is."""
        self.check_root(root)

    def barrier(self) -> None:
        """Returns at once."""

    def set_timeout(self, seconds: float) -> None:
        """Does nothing: there is nobody to wait for."""

    def check_health(self) -> None:
        """Returns: the one rank is alive."""

    def close(self) -> None:
        """Has nothing to give back."""
