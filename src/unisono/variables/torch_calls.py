"""What two functions of torch do in the thread of a replica: backward passes, and `batch_norm`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unisono.contexts import ReplicaContext, current_replica
from unisono.variables.batch_norm import synchronized_batch_norm
from unisono.variables.outsiders import check_backward, check_statistics


@functools.cache
def watch_calls() -> None:
    """From now on, replicas are asked before and after their backward passes, and normalise."""
    _watch_backward()
    _watch_batch_norm()


def _replica() -> ReplicaContext | None:
    context = current_replica()
    return None if context is None or context.strategy.extended.mirrors.is_single else context


def _watch_backward() -> None:
    # `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all call it there.
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @functools.wraps(run)
    def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        context = _replica()
        # A pass within another one is a part of that, such as that of a checkpoint.
        is_inner = torch._C._current_graph_task_id() != -1
        if context is None or is_inner or not kwargs.get("accumulate_grad"):
            return run(roots, *args, **kwargs)
        check_backward(context, roots)
        result = run(roots, *args, **kwargs)
        context.strategy.extended.gradients.after_backward(context)
        return result

    autograd._engine_run_backward = run_backward


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
        if context.strategy.extended.mirrors.synchronizes:
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
