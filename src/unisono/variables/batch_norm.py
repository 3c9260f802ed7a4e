"""Batch normalization over the whole batch of all replicas."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.contexts import ReplicaContext, current_replica
from unisono.errors import UnsupportedError
from unisono.options import ReduceOp
from unisono.sharing import computed_once


def synchronized_batch_norm(
    context: ReplicaContext,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Does what `functional.batch_norm` does in training, over the batches of all replicas."""
    context.notes.num_batch_norms += 1
    dims = [dim for dim in range(input.dim()) if dim != 1]
    num_values = input.new_tensor(input.numel() // max(1, input.shape[1]))
    total, count = context.all_reduce(ReduceOp.SUM, [input.sum(dims), num_values])
    mean = total / count
    centered = input - _spread(mean, input)
    squares = context.all_reduce(ReduceOp.SUM, centered.square().sum(dims))
    output = centered * _spread(torch.rsqrt(squares / count + eps), input)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = squares / (count - 1).clamp(min=1)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    if weight is not None:
        output = output * _spread(weight, input)
    return output if bias is None else output + _spread(bias, input)


def _spread(per_channel: Tensor, like: Tensor) -> Tensor:
    return per_channel.reshape([1, -1] + [1] * (like.dim() - 2))


class SynchronizedBatchNorm:
    """Comes before the class of a batch normalization, whose own `forward` it keeps."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Does what the class does, and makes sure that it was over all replicas."""
        module = cast(_BatchNorm, self)
        context = current_replica()
        uses_batch = module.training or module.running_mean is None
        if context is None or not uses_batch:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        before = context.notes.num_batch_norms
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if context.notes.num_batch_norms == before:
            raise UnsupportedError(
                f"`synchronize_batch_norm=True` cannot synchronize {type(self).__name__}, because "
                "its `forward` calls neither `super().forward` nor "
                "`torch.nn.functional.batch_norm`. Change its `forward`, or make the strategy "
                "without `synchronize_batch_norm`."
            )
        return output


@computed_once
def synchronized(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of clones of `cls` whose batch normalization is over all replicas."""
    if not issubclass(cls, _BatchNorm) or issubclass(cls, nn.SyncBatchNorm):
        return cls
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (SynchronizedBatchNorm, cls), namespace)
