"""Batch normalisation over the batches of all replicas, as over one big batch."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.contexts import current_replica
from unisono.options import ReduceOp


class SynchronizedBatchNorm:
    """Comes before the class of a batch normalisation; it may be given an empty batch."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises with the mean and variance of all replicas, and keeps these."""
        module = cast(_BatchNorm, self)
        context = current_replica()
        uses_batch = module.training or module.running_mean is None
        if context is None or not uses_batch:
            return cast(Tensor, super().forward(input))  # type: ignore[misc]
        module._check_input_dim(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        num_values = input.new_tensor(input.numel() // max(1, input.shape[1]))
        total, count = context.all_reduce(ReduceOp.SUM, [input.sum(dims), num_values])
        centred = input - _spread(total / count, input)
        squares = context.all_reduce(ReduceOp.SUM, centred.square().sum(dims))
        variance = squares / count
        _keep_statistics(module, (total / count).detach(), squares.detach(), count)
        output = centred * _spread(torch.rsqrt(variance + module.eps), input)
        if module.weight is not None:
            output = output * _spread(module.weight, input) + _spread(module.bias, input)
        return output


def _spread(per_channel: Tensor, like: Tensor) -> Tensor:
    return per_channel.reshape([1, -1] + [1] * (like.dim() - 2))


@torch.no_grad()
def _keep_statistics(module: Any, mean: Tensor, squares: Tensor, count: Tensor) -> None:
    if not module.training or not module.track_running_stats:
        return
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:
        momentum = 1.0 / float(module.num_batches_tracked)
    unbiased = squares / (count - 1).clamp(min=1)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)


@functools.cache
def synchronized(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of clones of `cls` whose batch normalisation is over all replicas."""
    if not issubclass(cls, _BatchNorm) or issubclass(cls, nn.SyncBatchNorm):
        return cls
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (SynchronizedBatchNorm, cls), namespace)
