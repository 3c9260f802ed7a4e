"""A reduction that clips the gradients of each replica before it averages them.

Written from the documentation alone: writing your own reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import unisono as uo


class ClippedMean(uo.ReductionToOneDevice):
    """Clips by the norm over all parameters of a replica, so that one bad batch cannot dominate."""

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = max_norm
        self.norms: list[float] = []

    def reduce_gradients_implementation(
        self, reduce_op: uo.ReduceOp, value_destination_pairs: Sequence[Any], options: Any
    ) -> Any:
        values = [value for value, _ in value_destination_pairs]
        num_replicas = len(values[0].values)
        factors = [self.factor([value.values[i] for value in values]) for i in range(num_replicas)]
        pairs = []
        for value, destinations in value_destination_pairs:
            clipped = [part * factor for part, factor in zip(value.values, factors, strict=True)]
            pairs.append((uo.PerReplica(clipped, devices=value.devices), destinations))
        return self.batch_reduce_implementation(reduce_op, pairs, options)

    def factor(self, gradients: list[Tensor]) -> Tensor:
        norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
        self.norms.append(norm.item())
        factor: Tensor = (self.max_norm / norm).clamp(max=1.0)
        return factor
