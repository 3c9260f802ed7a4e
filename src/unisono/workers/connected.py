"""Workers that a communicator connects."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.communicators import Communicator, GraphEngine
from unisono.communicators.wire import gather_objects
from unisono.devices import Device
from unisono.errors import ReplicaMismatchError
from unisono.kernels import reduce_batch
from unisono.options import ReduceOp
from unisono.packing import PackLayout, Spec
from unisono.reductions import CrossDeviceOps, ReplicaLayout, Workers
from unisono.values import is_sparse
from unisono.workers.across import AcrossWorkers
from unisono.workers.exchange import WorkerExchange
from unisono.workers.terms import tree_terms

if TYPE_CHECKING:
    from unisono.gradients import Exchange
    from unisono.strategies.worker import WorkerReplicas

# Small and rare, so it goes through host memory, which every communicator supports.
_HOST = torch.device("cpu")


class ConnectedWorkers(Workers):
    """All workers of the job, including this one.

    Args:
        communicator: Connects them.
        counts: How many replicas each has; None if all have the same number.
    """

    def __init__(self, communicator: Communicator, counts: Sequence[int] | None = None) -> None:
        self.change(communicator, counts)

    def change(self, communicator: Communicator, counts: Sequence[int] | None = None) -> None:
        """Makes these the workers that there are from now on."""
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self._counts = None if counts is None else tuple(counts)
        self._layouts: dict[int, ReplicaLayout] = {}

    @property
    def graph_engine(self) -> GraphEngine | None:  # type: ignore[override]
        """See `Communicator.graph_engine`."""
        return self.communicator.graph_engine

    def layout(self, num_local: int) -> ReplicaLayout:
        if num_local not in self._layouts:
            if self._counts is not None and len(set(self._counts)) > 1:
                if num_local != self._counts[self.rank]:
                    raise ReplicaMismatchError(
                        f"A value has {num_local} components on worker {self.rank}, which has "
                        f"{self._counts[self.rank]} of the {sum(self._counts)} replicas. Give one "
                        "component per replica."
                    )
                self._layouts[num_local] = ReplicaLayout(self._counts, self.rank)
            else:
                self._layouts[num_local] = ReplicaLayout((num_local,) * self.size, self.rank)
        return self._layouts[num_local]

    def across(self, ops: CrossDeviceOps, devices: tuple[Device, ...]) -> CrossDeviceOps:
        return AcrossWorkers(ops, self, devices) if self.are_many else ops

    def combine(self, op: ReduceOp, packs: Sequence[Tensor]) -> Tensor:
        shape = tree_terms(self.layout(len(packs)))
        terms = [reduce_batch(op, [tuple(packs[own])], [1])[0][0] for own in shape.own]
        if self.are_many:
            shape.all_reduce(self.communicator, op, terms)
        return terms[0]

    def exchange(self, replicas: WorkerReplicas) -> Exchange | None:
        ops, op, options = replicas.cross_device_ops, replicas.reduce_gradients, replicas.options
        if not isinstance(ops, AcrossWorkers):
            return None
        return WorkerExchange(replicas.mirrors, ops, op, options)

    def share(self, tensors: Sequence[Tensor]) -> None:
        if not self.are_many:
            return
        here = [tensor.detach().to(_HOST) for tensor in tensors]
        layout = PackLayout.of_groups(list(map(Spec.of, here)), [range(len(here))])
        packs = layout.pack(here)
        for pack in packs:
            self.communicator.broadcast(pack)
        layout.write(packs, [tensor.detach() for tensor in tensors])

    def of_chief(self, tensor: Tensor) -> Tensor:
        if not self.are_many:
            return tensor
        if is_sparse(tensor):
            chosen: Tensor = self.gather_objects(tensor)[0]
            return chosen.to(tensor.device)
        copy = tensor.detach().clone()
        self.share([copy])
        return copy

    def gather(self, tensor: Tensor) -> list[Tensor]:
        if not self.are_many:
            return [tensor]
        gathered = self.communicator.all_gather(tensor.detach().to(_HOST))
        return [one.to(tensor.device) for one in gathered]

    def gather_objects(self, thing: Any) -> list[Any]:
        return gather_objects(self.communicator, thing)

    def takes(self, device: torch.device) -> bool:
        return self.communicator.takes(device)

    def within(self, seconds: float | None) -> AbstractContextManager[Any]:
        return self.communicator.within(seconds)

    def check_health(self) -> None:
        self.communicator.check_health()

    def close(self) -> None:
        self.communicator.close()
