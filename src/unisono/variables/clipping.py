"""Gradients that torch clips on replicas stay equal on all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.contexts import current_replica
from unisono.sharing import computed_once
from unisono.variables.leaves import Mark

_NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


@computed_once
def let_clipping_be_known() -> None:
    """Makes a reduced gradient count as reduced after torch has clipped it."""
    for name in _NAMES:
        clip = getattr(torch.nn.utils.clip_grad, name, None)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            # Older versions of torch have fewer.
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
        found = map(context.replicas.mirrors.owner_of_leaf, listed)
        owners = [one for one in found if one is not None]
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
