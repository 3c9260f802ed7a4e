"""What `batch_norm` does in the thread of a replica."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unisono.contexts import ReplicaContext, current_replica
from unisono.sharing import computed_once
from unisono.variables.batch_norm import synchronized_batch_norm
from unisono.variables.outsiders import check_statistics


@computed_once
def watch_calls() -> None:
    """From now on, replicas watch batch normalization, and synchronize it if asked to."""
    _watch_batch_norm()


def _replica() -> ReplicaContext | None:
    context = current_replica()
    return None if context is None or context.replicas.mirrors.is_single else context


def _watch_batch_norm() -> None:
    original: Any = functional.batch_norm

    @functools.wraps(original)
    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,  # noqa: FBT001, FBT002 - as in torch
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        given = (input, running_mean, running_var, weight, bias, training, momentum, eps)
        # A compiler traces what torch does.
        if not training or torch.compiler.is_compiling():
            return original(*given)
        context = _replica()
        if context is None:
            return original(*given)
        if running_mean is not None:
            check_statistics(context, running_mean)
        if context.replicas.mirrors.synchronizes:
            return synchronized_batch_norm(
                context, input, running_mean, running_var, weight, bias, momentum, eps
            )
        return original(*given)

    made: Any = batch_norm
    # `torch.compile` goes by the file of a function: this one is to be traced as torch's own is.
    made.__code__ = made.__code__.replace(co_filename=original.__code__.co_filename)
    # TorchScript compiles the function that these name.
    made.__script_if_tracing_wrapper = True
    made.__original_fn = original
    functional.batch_norm = made
