"""Packs of gradients that a communication hook reduces."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from unisono.hooks import CommHook, GradBucket
from unisono.options import ReduceOp
from unisono.reductions import AcrossWorkers
from unisono.variables.leaves import Leaves
from unisono.variables.worker_packs import Pack


class HookedPack(Pack):
    """A pack that a hook turns from the mean of this worker into the mean of all.

    Args:
        members: The parameters.
        ops: Connects the workers.
        op: What the gradients become. A sum is made of the mean.
        hook: The hook.
        index: The number of this pack among those of a backward pass.
        is_last: Whether it is the last of them.
    """

    def __init__(
        self,
        members: Sequence[Leaves],
        ops: AcrossWorkers,
        op: ReduceOp,
        hook: CommHook,
        *,
        index: int,
        is_last: bool,
    ) -> None:
        leaves = members[0].leaves
        super().__init__(members, ops, leaves[0].dtype, len(leaves))
        self._factor = 1 if op is ReduceOp.MEAN else len(leaves) * ops.communicator.size
        self._hook = hook
        self._index = index
        self._is_last = is_last
        self._stream: torch.cuda.Stream | None = None

    def fill(self, arrived: Collection[Leaves]) -> None:
        """Takes in the gradients of this worker's replicas; of some there are new ones."""
        super().fill(arrived)
        if self._terms.is_cuda:
            self._stream = torch.cuda.current_stream(self._terms.device)

    @torch.no_grad()
    def exchange(self) -> None:
        """Lets the hook reduce the gradients; which of them are new the hook does not see."""
        flat = self._terms[0][: self._num_used_at]
        parameters = [one.primary for one in self.members]
        bucket = GradBucket(self._index, flat, parameters, is_last=self._is_last)
        with torch.cuda.stream(self._stream):
            result = self._hook(bucket)
            if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
                flat.copy_(result.reshape(-1))
            if self._factor != 1:
                flat.mul_(self._factor)
        self._ops.communicator.all_reduce(ReduceOp.SUM, [self._terms[0][self._num_used_at :]])

    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        view.copy_(self._ops.mean_here(grads))
