"""Collectives between replicas that gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.errors import ReplicaMismatchError
from unisono.kernels import check_gather
from unisono.options import CommunicationOptions, ReduceOp
from unisono.values import PerReplica, components_of, is_sparse, weighed

if TYPE_CHECKING:
    from unisono.contexts.current import ReplicaContext

_LINEAR = (ReduceOp.SUM, ReduceOp.MEAN)


@dataclass(frozen=True)
class Reduction:
    """An all-reduce that a replica takes part in."""

    context: ReplicaContext
    op: ReduceOp
    options: CommunicationOptions | None

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-reduces the tensors of all replicas in one batch, so that gradients flow through."""
        if not tensors:
            return []
        if self.op in _LINEAR and not any(is_sparse(tensor) for tensor in tensors):
            apply: Any = _AllReduce.apply
            return list(apply(self, *tensors))
        return self.of_values(tensors)

    def of_values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-reduces the tensors without their graphs."""
        context, op = self.context, self.op
        replicas = context.replicas
        factors = replicas.counting.factors(op)

        def work(given: list[Sequence[Tensor]]) -> list[list[Tensor]]:
            lengths = [len(own) for own in given]
            if len(set(lengths)) > 1:
                counts = enumerate(lengths, replicas.first_replica_id)
                raise ReplicaMismatchError(
                    "The replicas called `all_reduce` with different numbers of tensors: "
                    f"{', '.join(f'replica {i} {length}' for i, length in counts)}. Pass the same "
                    "structure on every replica."
                )
            values = [
                PerReplica.placed(
                    weighed(op, components, factors) if factors else components,
                    replicas.worker_devices,
                )
                for components in zip(*given, strict=True)
            ]
            pairs = [(value, value) for value in values]
            results = replicas.cross_device_ops.batch_reduce(op, pairs, self.options)
            return [list(own) for own in zip(*map(components_of, results), strict=True)]

        what = f"all_reduce({op.name}) of {len(tensors)} tensors"
        result: list[Tensor] = context.meeting.meet(context.local_id, what, tensors, work)
        return result

    def of_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Reduces gradients on their way back, each with what its replica's loss counts for.

        The leaves of a replica will be weighted with its own weight, which is taken out again here.
        """
        weight = self.context.gradient_weight
        given = [gradient * weight for gradient in gradients] if weight != 1.0 else gradients
        totals = self.of(given)
        return [total / weight for total in totals] if weight not in (0.0, 1.0) else totals


class _AllReduce(torch.autograd.Function):
    """The gradient of an all-reduce is the all-reduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduction = reduction
        return tuple(reduction.of_values(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.reduction.of_gradients(gradients)


def gather_tensors(
    context: ReplicaContext, tensor: Tensor, axis: int, options: CommunicationOptions | None
) -> Tensor:
    """Puts the tensors of all replicas end to end."""
    check_gather([tensor], axis)
    apply: Any = _AllGather.apply
    gathered: Tensor = apply(context, options, axis, tensor)
    return gathered


class _AllGather(torch.autograd.Function):
    """The gradient of a gather is each replica's own part of the summed gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        context: ReplicaContext,
        options: CommunicationOptions | None,
        axis: int,
        tensor: Tensor,
    ) -> Tensor:
        replicas = context.replicas
        counting = replicas.counting.factors(ReduceOp.SUM) or [1.0] * context.num_local_replicas

        def work(given: list[Tensor]) -> list[tuple[Tensor, int]]:
            workers = replicas.workers
            given = [
                own if counts else own.narrow(axis, 0, 0)
                for own, counts in zip(given, counting, strict=True)
            ]
            with workers.within(options.timeout_seconds if options else None):
                total, first = workers.concatenate(given, axis)
            sizes = [own.shape[axis] for own in given]
            starts = [first + sum(sizes[:i]) for i in range(len(sizes))]
            parts = [total, *(total.to(own.device, copy=True) for own in given[1:])]
            return list(zip(parts, starts, strict=True))

        replica_id = context.local_id
        what = f"all_gather along {axis}"
        gathered, start = context.meeting.meet(replica_id, what, tensor, work)
        ctx.arguments = context, options, axis, start, tensor.shape
        return gathered  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        context, options, axis, start, shape = ctx.arguments
        (total,) = Reduction(context, ReduceOp.SUM, options).of_gradients(gradients)
        if not context.counts:
            # What it gave is not in the result.
            return None, None, None, total.new_zeros(shape)
        return None, None, None, total.narrow(axis, start, shape[axis])
