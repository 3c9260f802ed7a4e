"""Runs a plan on tensors. Only this code moves values between memories."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.algorithms.plan import Combine, Copy, Plan
from unisono.kernels import divide, reduce_batch, wide_dtype
from unisono.options import ReduceOp
from unisono.tracing import span


def run(
    plan: Plan, op: ReduceOp, batch: Sequence[Sequence[Tensor]], places: Sequence[torch.device]
) -> list[tuple[Tensor, ...]]:
    """Reduces each item of `batch`, one tensor per replica, and returns one per destination.

    The inputs are not changed, and every returned tensor has its own memory.
    """
    if not batch:
        return []
    if plan.is_one_sum:
        return reduce_batch(op, batch, [len(plan.outputs)] * len(batch))
    held: dict[int, Sequence[Tensor]] = dict(enumerate(zip(*batch, strict=True)))
    dtypes = [item[0].dtype for item in batch]
    for step in plan.steps:
        if isinstance(step, Copy):
            with span("copy", "copy", held[step.source], to=places[step.place]):
                held[step.target] = _copied(held[step.source], places[step.place])
        else:
            items = list(zip(*(held[source] for source in step.sources), strict=True))
            written = _combined(step, op, items, dtypes, plan.num_replicas)
            held.update(zip(step.targets, zip(*written, strict=True), strict=True))
    return list(zip(*(held[output] for output in plan.outputs), strict=True))


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    # Between GPUs without peer access, CUDA copies through host memory.
    return [tensor.detach().to(device, copy=True) for tensor in tensors]


def _combined(
    step: Combine,
    op: ReduceOp,
    items: Sequence[tuple[Tensor, ...]],
    dtypes: Sequence[torch.dtype],
    num_replicas: int,
) -> list[tuple[Tensor, ...]]:
    """Combines values or partial results; partial results stay wide, and are not divided."""
    if step.is_result and step.is_whole:
        return reduce_batch(op, items, [len(step.targets)] * len(items))
    part_op = ReduceOp.SUM if op is ReduceOp.MEAN else op
    wide = [tuple(part.to(wide_dtype(part.dtype)) for part in parts) for parts in items]
    totals = reduce_batch(part_op, wide, [1] * len(items))
    if not step.is_result:
        return totals
    results = [
        divide(total, num_replicas, dtype) if op is ReduceOp.MEAN else total.to(dtype)
        for (total,), dtype in zip(totals, dtypes, strict=True)
    ]
    return [(result, *(result.clone() for _ in step.targets[1:])) for result in results]
