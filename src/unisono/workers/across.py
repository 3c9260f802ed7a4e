"""Reductions over the replicas of many workers: inside each worker first, then between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.communicators import all_reduce_sparse
from unisono.devices import Device, this_machine
from unisono.kernels import check_replicas, divide, result_dtype, undivided, wide_dtype
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import PackLayout, Spec, by_dtype, group_by_bytes
from unisono.reductions import CrossDeviceOps, Destinations, Result, mirrored
from unisono.reductions.cross_device_ops import Pairs
from unisono.values import PerReplica, as_tensor, components_of, concatenate, is_sparse
from unisono.workers.terms import Terms, tree_terms, whole_terms

if TYPE_CHECKING:
    from unisono.workers.connected import ConnectedWorkers

# Large enough that there are few collectives, small enough to be gone from no cache in between.
_BYTES_PER_PACK = 16 << 20


class AcrossWorkers(CrossDeviceOps):
    """Reduces over the replicas of all workers, which call the same reductions in one order."""

    reads_values = True

    def __init__(
        self, local: CrossDeviceOps, workers: ConnectedWorkers, devices: tuple[Device, ...]
    ) -> None:
        self._local = local
        self._workers = workers
        self.communicator = workers.communicator
        self.devices = devices
        self.layout = workers.layout(len(devices))
        self.num_replicas = self.layout.total

    def close(self) -> None:
        self._local.close()

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Result:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Result]:
        values = [self._read(reduce_op, value) for value, _ in value_destination_pairs]
        results: dict[int, Tensor] = {}
        dense = [i for i, tensors in enumerate(values) if not all(map(is_sparse, tensors))]
        with self.communicator.within(options.timeout_seconds):
            for members in self._packs(values, dense, options):
                results.update(zip(members, self._reduce(reduce_op, values, members), strict=True))
            for i, tensors in enumerate(values):
                if i not in results:
                    results[i] = self._reduce_sparse(reduce_op, tensors)
        return [
            self._deliver(results[i], destinations)
            for i, (_, destinations) in enumerate(value_destination_pairs)
        ]

    def broadcast_implementation(self, tensor: Tensor, destinations: Destinations) -> Result:
        """See `CrossDeviceOps.broadcast_implementation`: a copy inside this worker."""
        return self._local.broadcast_implementation(tensor, destinations)

    def _read(self, op: ReduceOp, value: Any) -> list[Tensor]:
        tensors = tuple(as_tensor(component).detach() for component in value.values)
        rank = self.communicator.rank
        first = self._workers.layout(len(tensors)).own.start
        check_replicas(op, tensors, f"The value of worker {rank}", first)
        if any(map(is_sparse, tensors)) and not all(map(is_sparse, tensors)):
            return [tensor.to_dense() for tensor in tensors]
        return list(tensors)

    def _packs(
        self, values: list[list[Tensor]], dense: list[int], options: CommunicationOptions
    ) -> list[list[int]]:
        """Groups values that travel together, which have one dtype."""
        limit = options.bytes_per_pack or _BYTES_PER_PACK
        specs = [Spec.of(tensors[0]) for tensors in values]
        return [
            [members[place] for place in group]
            for members in by_dtype(specs, dense)
            for group in group_by_bytes([specs[i].num_bytes for i in members], limit)
        ]

    def _reduce(self, op: ReduceOp, values: list[list[Tensor]], members: list[int]) -> list[Tensor]:
        tensors = [values[i] for i in members]
        dtype = tensors[0][0].dtype
        num_replicas = self._workers.layout(len(tensors[0])).total
        is_mean_of_integers = op is ReduceOp.MEAN and result_dtype(op, dtype) != dtype
        sent = ReduceOp.SUM if is_mean_of_integers else op
        layout = PackLayout.of_groups([Spec.of(own[0]) for own in tensors], [range(len(tensors))])
        shape = self.terms(len(tensors[0]))
        terms = [layout.pack(term)[0] for term in self._terms(sent, tensors, shape)]
        count = num_replicas if sent is ReduceOp.MEAN else None
        shape.all_reduce(self.communicator, sent, terms, count)
        total = terms[0]
        if is_mean_of_integers:
            total = divide(total, num_replicas, dtype)
        return layout.unpack([total.to(result_dtype(op, dtype))])

    def _terms(self, op: ReduceOp, tensors: list[list[Tensor]], shape: Terms) -> list[list[Tensor]]:
        """Returns what this worker brings of each value, term by term, where it can be sent."""
        dtype = tensors[0][0].dtype
        place = self.place(tensors[0][0].device)
        terms = []
        for own in shape.own:
            parts = [replicas[own] for replicas in tensors]
            if shape.are_sums:
                parts = [[part.to(wide_dtype(dtype)) for part in one] for one in parts]
            is_sum = len(parts[0]) > 1
            if is_sum:
                # Without rounding to a narrow dtype.
                totals = self._local.batch_reduce(undivided(op), self._pairs(parts))
                parts = [[_only(total)] for total in totals]
            # Collectives write where they read, and what a replica gave stays as it is.
            terms.append([one[0].to(place, copy=not is_sum).contiguous() for one in parts])
        return terms

    def terms(self, num_local: int) -> Terms:
        """Returns which replicas are combined before anything is sent.

        They are whole subtrees of the sum over all workers. A user's own reduction is given all
        replicas of its worker.
        """
        layout = self._workers.layout(num_local)
        return tree_terms(layout) if self.is_tree_sum else whole_terms(layout)

    @property
    def share(self) -> float:
        """The number of this worker's replicas over the mean number of all workers."""
        return len(self.devices) * self.communicator.size / self.num_replicas

    @property
    def is_tree_sum(self) -> bool:
        """Whether what reduces between the devices of this worker adds up in that order."""
        return self._local.is_tree_sum and not self._local.wants_all_gradients

    def reduce_each(self, op: ReduceOp, tensors: Sequence[Tensor]) -> Tensor:
        """Reduces a tensor of each of this worker's replicas with those of all other replicas."""
        return self._reduce(op, [list(tensors)], [0])[0]

    def any_worker(self, own: Sequence[bool]) -> list[bool]:
        """Returns what is true on any worker. All give the same number of things."""
        gathered = self.communicator.all_gather(torch.tensor(own))
        return torch.stack(gathered).any(0).tolist()

    def gather_each(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns a tensor of each replica of all workers."""
        return [one for own in self._workers.gather_objects(list(tensors)) for one in own]

    def combine_here(self, op: ReduceOp, tensors: Sequence[Tensor]) -> Tensor:
        """Lets what reduces between the devices of this worker combine a value of its replicas."""
        ((value, target),) = self._pairs([tensors])
        return _only(self._local.reduce(op, value, target))

    @property
    def wants_all_gradients(self) -> bool:
        """Whether what reduces between the devices of this worker wants them."""
        return self._local.wants_all_gradients

    def reduce_gradients_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Result]:
        values = [list(value.values) for value, _ in value_destination_pairs]
        totals = self.combine_gradients(reduce_op, values)
        return [
            self._deliver(self._reduce_between(reduce_op, total), destinations)
            for total, (_, destinations) in zip(totals, value_destination_pairs, strict=True)
        ]

    def combine_gradients(self, op: ReduceOp, values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Lets a user's own reduction combine all gradients of this worker's replicas."""
        return list(map(_only, self._local.reduce_gradients(undivided(op), self._pairs(values))))

    def _reduce_between(self, op: ReduceOp, total: Tensor) -> Tensor:
        """Reduces what this worker has combined with what the others have."""
        sent = total.to(self.place(total.device))
        if is_sparse(sent):
            return all_reduce_sparse(self.communicator, op, sent, self.num_replicas)
        sent = sent.contiguous()
        count = self.num_replicas if op is ReduceOp.MEAN else None
        self.communicator.all_reduce(op, [sent.view(-1)], count)
        return sent

    def _pairs(self, values: Sequence[Sequence[Tensor]]) -> Pairs:
        devices = self.devices[: len(values[0])] if values else ()
        target = Destinations(self.devices[:1])
        return [(PerReplica.placed(tuple(own), devices), target) for own in values]

    def place(self, device: torch.device) -> torch.device:
        """Returns where a tensor must be for the workers to exchange it."""
        return device if self.communicator.takes(device) else torch.device("cpu")

    def _reduce_sparse(self, op: ReduceOp, tensors: list[Tensor]) -> Tensor:
        place = self.place(tensors[0].device)
        total = concatenate(undivided(op), [tensor.to(place) for tensor in tensors])
        count = self._workers.layout(len(tensors)).total
        return all_reduce_sparse(self.communicator, op, total, count)

    def _deliver(self, total: Tensor, destinations: Destinations) -> Result:
        machine = this_machine()
        first, *others = (machine.torch_device(device) for device in destinations.devices)
        copies = (total.to(first), *(total.to(other, copy=True) for other in others))
        return mirrored(copies, destinations)


def _only(result: Result) -> Tensor:
    """Returns the tensor of a result for one device, which may be wrapped all the same."""
    tensor: Tensor = components_of(result)[0]
    return tensor
