"""Packs of gradients that a communication hook reduces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from unisono.hooks import GradBucket
from unisono.hooks.hook import CommHook
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

    def _combine(self, grads: Sequence[Tensor], view: Tensor) -> None:
        view.copy_(self._ops.mean_here(grads))

    @torch.no_grad()
    def _reduce(self) -> None:
        """Lets the hook reduce the gradients; which of them are new the hook does not see."""
        flat, is_new = self._terms[0].split([self._num_used_at, len(self.members)])
        parameters = [one.primary for one in self.members]
        bucket = GradBucket(self._index, flat, parameters, is_last=self._is_last)
        is_on_gpu = self._place.type == "cuda"
        with torch.cuda.device(self._place) if is_on_gpu else nullcontext():
            result = self._hook(bucket)
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            flat.copy_(result.reshape(-1))
        if self._factor != 1:
            flat.mul_(self._factor)
        self._ops.communicator.all_reduce(ReduceOp.SUM, [is_new])
