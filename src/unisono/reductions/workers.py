"""The workers of a strategy: who has which replicas, and what they exchange besides reductions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.devices import Device
from unisono.kernels import check_gather, reduce_batch
from unisono.options import ReduceOp
from unisono.reductions.cross_device_ops import CrossDeviceOps

if TYPE_CHECKING:
    from unisono.communicators import GraphEngine
    from unisono.gradients import Exchange
    from unisono.strategies.worker import WorkerReplicas


def dealt(num_things: int, num_parts: int) -> tuple[int, ...]:
    """Returns the sizes of parts that differ by at most one; the larger parts come first.

    >>> dealt(8, 3), dealt(4, 4), dealt(2, 3)
    ((3, 3, 2), (1, 1, 1, 1), (1, 1, 0))
    """
    share, num_larger = divmod(num_things, num_parts)
    return tuple(share + (i < num_larger) for i in range(num_parts))


@dataclass(frozen=True)
class ReplicaLayout:
    """How many replicas each worker has. Their numbers follow the ranks of the workers."""

    counts: tuple[int, ...]
    rank: int

    @functools.cached_property
    def ranges(self) -> list[range]:
        """The replicas of each worker."""
        ends = itertools.accumulate(self.counts, initial=0)
        return list(itertools.starmap(range, itertools.pairwise(ends)))

    @property
    def total(self) -> int:
        """The number of replicas of all workers."""
        return self.ranges[-1].stop

    @property
    def own(self) -> range:
        """The replicas of this worker."""
        return self.ranges[self.rank]

    @property
    def are_equal(self) -> bool:
        """Whether all workers have the same number of replicas."""
        return len(set(self.counts)) == 1

    @property
    def are_several(self) -> bool:
        """Whether a worker has several replicas, so that all have `PerReplica` values."""
        return max(self.counts) > 1


class Workers:
    """All workers of the job: here this one alone. `unisono.workers` connects several."""

    rank = 0
    size = 1
    # What carries collectives of GPU tensors, if CUDA graphs may hold them.
    graph_engine: GraphEngine | None = None

    @property
    def are_many(self) -> bool:
        """Whether there is another worker."""
        return self.size > 1

    def layout(self, num_local: int) -> ReplicaLayout:
        """Returns which worker has which replicas, where this worker has `num_local`."""
        return ReplicaLayout((num_local,), 0)

    def across(self, ops: CrossDeviceOps, devices: tuple[Device, ...]) -> CrossDeviceOps:
        """Returns what reduces over the replicas of all workers, given what does on this one."""
        return ops

    def combine(self, op: ReduceOp, packs: Sequence[Tensor]) -> Tensor:
        """Combines a vector per replica over the replicas of all workers, in the order of sums."""
        return reduce_batch(op, [tuple(packs)], [1])[0][0]

    def exchange(self, replicas: WorkerReplicas) -> Exchange | None:
        """Returns what gradients of these replicas pass through on their way to other workers."""
        return None

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites the tensors of all workers with those of the chief."""

    def of_chief(self, tensor: Tensor) -> Tensor:
        """Returns the chief's value of `tensor`."""
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all workers, on the device of this worker's. Shapes may differ."""
        return [tensor]

    def concatenate(self, tensors: Sequence[Tensor], axis: int) -> tuple[Tensor, int]:
        """Concatenates the tensors of all replicas, and returns where this worker's begin."""
        check_gather(tensors, axis, self.layout(len(tensors)).own.start)
        place = tensors[0].device
        here = torch.cat([tensor.detach().to(place) for tensor in tensors], dim=axis)
        gathered = self.gather(here)
        check_gather(gathered, axis, holder="worker")
        first = sum(other.shape[axis] for other in gathered[: self.rank])
        return (torch.cat(gathered, dim=axis) if len(gathered) > 1 else here), first

    def gather_objects(self, thing: Any) -> list[Any]:
        """Returns the objects of all workers, their tensors on the host, or only this worker's.

        `unisono.communicators.wire` must support them.
        """
        return [thing]

    def takes(self, device: torch.device) -> bool:
        """Whether workers exchange tensors on `device` without a copy."""
        return True

    def within(self, seconds: float | None) -> AbstractContextManager[Any]:
        """In the block, workers wait for each other for `seconds`; with None, as always."""
        return nullcontext()

    def check_health(self) -> None:
        """Raises a `CommunicationError` if another worker is lost."""

    def close(self) -> None:
        """Leaves the other workers."""
