"""Gradients that replicas have written themselves, and that no backward pass has reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UnsupportedError
from unisono.gradients.accumulation import Weighting
from unisono.modules.leaves import Leaves, show_gradients
from unisono.modules.mirrors import Mirrors
from unisono.options import ReduceOp
from unisono.reductions import Workers


def reduce_own(
    own: Sequence[Leaves],
    op: ReduceOp,
    mirrors: Mirrors,
    weighting: Weighting,
    reduce: Callable[[Sequence[Leaves]], None],
) -> None:
    """Reduces gradients that are not the reduced ones any more, and shows all of them.

    A gradient that is equal on all replicas was made of the reduced one, by clipping for example,
    and stays. Others are reduced as those of a backward pass are: `p.grad` that was assigned, added
    to, or left alone by `no_sync`.
    """
    changed = [one for one in own if not _is_new(one)]
    are_equal = _equal(changed, mirrors.workers)
    kept = {one for one, is_equal in zip(changed, are_equal, strict=True) if is_equal}
    left = [one for one in own if one not in kept]
    for one in left:
        _check(one, op, weighting, mirrors.name_of(one.primary))
        for leaf, weight in zip(one.leaves, weighting.weights, strict=True):
            if weight != 1.0 and leaf.grad is not None and not weighting.is_applied(leaf):
                leaf.grad = weighting.weigh(weight, leaf.grad)
    if left:
        reduce(left)
        for one in left:
            for leaf in one.leaves:
                weighting.forget(leaf)
    show_gradients(own)


def _equal(owners: Sequence[Leaves], workers: Workers) -> list[bool]:
    """Returns for each parameter whether all replicas of all workers have one gradient."""
    are_equal = [
        seems or _are_equal([leaf.grad for leaf in one.leaves])
        for one, seems in zip(owners, _seem_equal(owners), strict=True)
    ]
    if not workers.are_many or not owners:
        return are_equal
    sums = torch.stack(
        [
            _fingerprint(one.leaves[0].grad if is_equal else None)
            for one, is_equal in zip(owners, are_equal, strict=True)
        ]
    )
    first, *rest = workers.gather(sums)
    return [all(torch.equal(row, other[i]) for other in rest) for i, row in enumerate(first)]


def _check(one: Leaves, op: ReduceOp, weighting: Weighting, name: str) -> None:
    if op is not ReduceOp.MEAN and any(
        mark is not None and mark.grad() is leaf.grad
        for leaf, mark in zip(one.leaves, one.reduced, strict=True)
    ):
        raise UnsupportedError(
            f"The replicas changed the gradient of {name} in different ways after `backward()` "
            f"had reduced it with {op}, and it cannot be reduced twice. Change it before the "
            "reduction, in a hook of the parameter or in the loss, or once for all replicas with "
            "`unisono.once(fn)`."
        )
    if any(map(weighting.is_mixed, one.leaves)):
        raise UnsupportedError(
            f"The gradient of {name} was assigned after backward passes in `no_sync()`, which "
            "scale it by the replica's share of an uneven batch. Compute it with "
            "`torch.autograd.grad`, which does not scale it."
        )


def _is_new(one: Leaves) -> bool:
    """Whether a replica has a gradient where nothing was reduced before."""
    pairs = zip(one.leaves, one.reduced, strict=True)
    return any(mark is None and leaf.grad is not None for leaf, mark in pairs)


def _seem_equal(owners: Sequence[Leaves]) -> list[bool]:
    """Returns which gradients on GPUs are equal for sure, after waiting for the GPUs once."""
    grads = [[leaf.grad for leaf in one.leaves] for one in owners]
    are_fit = [all(map(_can_be_compared, own)) for own in grads]
    fit = [own for own, is_fit in zip(grads, are_fit, strict=True) if is_fit]
    if not fit:
        return [False] * len(owners)
    first: list[Any] = [own[0] for own in fit]
    largest = torch.zeros(len(fit), device=first[0].device)
    for i in range(1, len(fit[0])):
        others: list[Any] = [own[i].to(own[0].device) for own in fit]  # type: ignore[union-attr]
        norms = torch._foreach_norm(torch._foreach_sub(first, others), torch.inf)
        largest = torch.maximum(largest, torch.stack([norm.float() for norm in norms]))
    found = iter((largest == 0).tolist())
    return [is_fit and next(found) for is_fit in are_fit]


def _can_be_compared(grad: Tensor | None) -> bool:
    return (
        grad is not None
        and grad.is_cuda
        and grad.layout is torch.strided
        and grad.is_floating_point()
        and grad.numel() > 0
    )


def _are_equal(grads: Sequence[Tensor | None]) -> bool:
    first = grads[0]
    return first is not None and all(
        other is not None and _is_equal(first, other) for other in grads[1:]
    )


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    other = other.to(one.device)
    return torch.equal(one, other) or (
        torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _fingerprint(grad: Tensor | None) -> Tensor:
    """Returns two numbers that are the same on workers whose gradients are; NaN is not."""
    if grad is None or grad.layout is not torch.strided:
        return torch.full((2,), torch.nan, dtype=torch.float64)
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    wide = real.detach().double().cpu().nan_to_num()
    return torch.stack([wide.sum(), wide.square().sum()])
