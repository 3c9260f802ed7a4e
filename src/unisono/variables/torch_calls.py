"""What functions of torch do in the thread of a replica: batch normalization and clipping."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unisono.contexts import current_replica
from unisono.sharing import computed_once
from unisono.variables.batch_norm import synchronized_batch_norm
from unisono.variables.leaves import Mark
from unisono.variables.outsiders import check_statistics

# What clips gradients in torch. Older versions have fewer.
_NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


@computed_once
def watch_calls() -> None:
    """From now on, replicas watch batch normalization, and synchronize it if asked to."""
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
        context = current_replica()
        if context is None or context.replicas.mirrors.is_single:
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


@computed_once
def let_clipping_be_known() -> None:
    """Makes a reduced gradient count as reduced after torch has clipped it."""
    for name in _NAMES:
        clip = getattr(torch.nn.utils.clip_grad, name, None)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            if clip is not None and getattr(module, name, None) is clip:
                setattr(module, name, _wrapped(clip))


def _wrapped(clip: Any) -> Callable[..., Any]:
    @functools.wraps(clip)
    def wrapped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_replica()
        if context is None or context.replicas.mirrors.is_single:
            return clip(parameters, *args, **kwargs)
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        replica_id = context.local_id
        known = context.replicas.mirrors.owners
        owners = [known[id(one)] for one in listed if id(one) in known]
        reduced = [
            one
            for one in owners
            if (grad := one.leaves[replica_id].grad) is not None
            and (mark := one.reduced[replica_id]) is not None
            and mark.fits(grad)
        ]
        result = clip(listed, *args, **kwargs)
        if len(reduced) == len(owners):
            # The factor is computed from all of them, so it is equal on all replicas.
            for one in reduced:
                one.reduced[replica_id] = Mark.of(one.leaves[replica_id].grad)
        return result

    return wrapped
