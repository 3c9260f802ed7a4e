"""The base of all built-in reductions, which follow a schedule, and the simplest of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from unisono.arguments import check_callable, check_instance
from unisono.devices import Device, DeviceLike, Machine, resolve, this_machine
from unisono.errors import UnsupportedError
from unisono.kernels import check_replicas, divide, reduce_fused, reduce_into
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import Line
from unisono.reductions.cross_device_ops import CrossDeviceOps, Pairs, Result, mirrored
from unisono.reductions.destinations import Destinations
from unisono.values import DistributedValues, as_tensor, concatenate, is_sparse

if TYPE_CHECKING:
    from unisono.algorithms import Plan, Schedule

# Values, one tensor per replica in each.
Batch: TypeAlias = Sequence[tuple[Tensor, ...]]
AccumulationFn: TypeAlias = Callable[[list[Tensor]], Tensor]


class Ends(NamedTuple):
    """The devices that values come from, by replica id, and those that results go to."""

    sources: tuple[Device, ...]
    destinations: tuple[Device, ...]


@runtime_checkable
class Prices(Protocol):
    """What copies and sums on this host were measured to cost, as `unisono.costs.Tuning` has it."""

    def line(self, schedule: Schedule, memories: Sequence[Hashable]) -> Line:
        """Returns the cost of a schedule between devices of one process that have memories."""


class Route(NamedTuple):
    """A schedule planned for devices: what to do, and the torch device of each place."""

    plan: Plan
    places: tuple[torch.device, ...]
    root: torch.device
    outputs: tuple[torch.device, ...]


class ScheduledOps(CrossDeviceOps):
    """A cross-device operation that follows a schedule."""

    reads_values: ClassVar[bool] = True
    # Whether what is sent is what the schedule says, so that its cost can be predicted.
    keeps_to_schedule: ClassVar[bool] = True

    def __init__(self) -> None:
        self._routes: dict[tuple[Ends, int, Machine], Route] = {}
        self._are_one_sum: dict[tuple[Ends, Machine], bool] = {}

    def root(self, ends: Ends) -> Device:
        """Returns the device that reduces sparse values, and values that go to other devices."""
        return ends.destinations[0]

    def schedule(self, ends: Ends, places: Sequence[Device], turn: int) -> Schedule:
        """Returns the schedule over `places`; with each turn another device may be the root.

        By default, the root reduces all values.
        """
        from unisono.algorithms import one_device

        return one_device(
            len(ends.sources),
            root=places.index(self.root(ends)),
            destinations=[places.index(device) for device in dict.fromkeys(ends.destinations)],
        )

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Result:
        ends = Ends(per_replica_value.devices, destinations.devices)
        (result,) = self._reduce_group(reduce_op, None, [per_replica_value.values], ends, options)
        return mirrored(result, destinations)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Result]:
        if type(self).reduce_implementation is not ScheduledOps.reduce_implementation:
            # A subclass that reduces one value in its own way means batches too.
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)
        results: dict[int, Result] = {}
        for ends, indices in _by_ends(value_destination_pairs).items():
            batch = [value_destination_pairs[index][0].values for index in indices]
            written = self._reduce_group(reduce_op, indices, batch, ends, options)
            targets = Destinations(ends.destinations)
            for index, tensors in zip(indices, written, strict=True):
                results[index] = mirrored(tensors, targets)
        return [results[index] for index in range(len(value_destination_pairs))]

    def route(self, ends: Ends, turn: int = 0) -> Route:
        """Returns the route between `ends`, which is cached."""
        machine = this_machine()
        route = self._routes.get((ends, turn, machine))
        if route is None:
            from unisono.algorithms import make_plan

            places = self._places(ends)
            plan = make_plan(
                self.schedule(ends, places, turn),
                len(ends.sources),
                tuple(map(machine.memory, places)),
                tuple(map(places.index, ends.destinations)),
            )
            on = tuple(map(machine.torch_device, places))
            outputs = tuple(map(machine.torch_device, ends.destinations))
            route = Route(plan, on, machine.torch_device(self.root(ends)), outputs)
            self._routes[ends, turn, machine] = route
        return route

    def _places(self, ends: Ends) -> tuple[Device, ...]:
        others = dict.fromkeys((self.root(ends), *ends.destinations))
        return ends.sources + tuple(d for d in others if d not in ends.sources)

    def cost(self, ends: Ends, prices: Prices) -> Line:
        """Returns the cost of the schedule."""
        places = self._places(ends)
        memories = [this_machine().memory(place) for place in places]
        return prices.line(self.schedule(ends, places, 0), memories)

    def _reduce_group(
        self,
        op: ReduceOp,
        indices: Sequence[int] | None,
        batch: Sequence[tuple[Any, ...]],
        ends: Ends,
        options: CommunicationOptions,
    ) -> list[tuple[Tensor, ...]]:
        """Reduces values that come from and go to the same devices; `indices` are their places."""
        plain = self.reduce_plain(op, batch, ends)
        if None not in plain:
            return plain  # type: ignore[return-value]
        results = dict(enumerate(plain))
        left = [i for i, result in results.items() if result is None]
        read = {i: tuple(as_tensor(component) for component in batch[i]) for i in left}
        for i, tensors in read.items():
            what = "The value" if indices is None else f"Value {indices[i]} of the batch"
            check_replicas(op, tensors, what)
        dense = {}
        for i, tensors in read.items():
            sparse = sum(is_sparse(tensor) for tensor in tensors)
            if sparse == len(tensors):
                results[i] = _reduce_sparse(op, tensors, self.route(ends))
            else:
                dense[i] = tuple(t.to_dense() for t in tensors) if sparse else tensors
        if dense:
            reduced = self.reduce_dense(op, list(dense.values()), ends, options)
            results.update(zip(dense, reduced, strict=True))
        return list(results.values())  # type: ignore[arg-type]

    def is_one_sum(self, ends: Ends) -> bool:
        """Whether all that it does is one sum inside one memory, which the kernels know."""
        machine = this_machine()
        found = self._are_one_sum.get((ends, machine))
        if found is None:
            # Inside one memory, devices send each other nothing that had to be planned.
            is_inside = len({machine.memory(place) for place in self._places(ends)}) == 1
            is_default = type(self).schedule is ScheduledOps.schedule
            found = (is_inside and is_default) or self.route(ends).plan.is_one_sum
            self._are_one_sum[ends, machine] = found
        return found

    def reduce_plain(
        self, op: ReduceOp, batch: Sequence[tuple[Any, ...]], ends: Ends
    ) -> list[tuple[Tensor, ...] | None]:
        """Reduces the values that the native core supports, and returns None for the others."""
        if not self.is_one_sum(ends):
            return [None] * len(batch)
        return reduce_fused(op, batch, [len(ends.destinations)] * len(batch))

    def reduce_in_place(
        self, reduce_op: ReduceOp, batch: Sequence[Sequence[Tensor]], devices: tuple[Device, ...]
    ) -> bool:
        is_one_sum = self.reads_values and self.is_one_sum(Ends(devices, devices))
        return is_one_sum and reduce_into(reduce_op, batch, batch)

    def reduce_dense(
        self, op: ReduceOp, batch: Batch, ends: Ends, options: CommunicationOptions
    ) -> list[tuple[Tensor, ...]]:
        """Reduces dense tensors that fit together, and returns one tensor per destination."""
        route = self.route(ends)
        return route.plan.run(op, batch, route.places)


def _by_ends(pairs: Pairs) -> dict[Ends, list[int]]:
    """Groups the places of pairs that come from and go to the same devices."""
    groups: dict[Ends, list[int]] = {}
    ends = Ends((), ())
    group: list[int] = []
    for index, (value, destinations) in enumerate(pairs):
        sources, targets = value.devices, destinations.devices
        # Most pairs of a batch have the same tuples of devices.
        if sources is not ends.sources or targets is not ends.destinations:
            ends = Ends(sources, targets)
            group = groups.setdefault(ends, [])
        group.append(index)
    return groups


def _reduce_sparse(op: ReduceOp, tensors: Sequence[Tensor], route: Route) -> tuple[Tensor, ...]:
    here = [t if t.device == route.root else t.detach().to(route.root) for t in tensors]
    total = concatenate(op, here)
    first, *others = route.outputs
    return (total.to(first), *(total.to(output, copy=True) for output in others))


class ReductionToOneDevice(ScheduledOps):
    """Copies values to one device to reduce them there, then copies the result to the destinations.

    Replicas that share a memory, such as the CPU devices of a host, copy nothing: all values of a
    batch are reduced where they are, in one pass.

    Args:
        reduce_to_device: The device to reduce on. None means the first destination.
        accumulation_fn: Combines a list of tensors, in replica order and all on the device to
            reduce on, into one tensor. It must not change them. None adds them (or takes the
            minimum, maximum or product). A mean divides its result by the number of replicas. It is
            not used for sparse tensors, which are concatenated.
    """

    def __init__(
        self,
        reduce_to_device: DeviceLike | None = None,
        accumulation_fn: AccumulationFn | None = None,
    ) -> None:
        super().__init__()
        self._reduce_to = None if reduce_to_device is None else resolve(reduce_to_device)
        if accumulation_fn is not None:
            check_callable("accumulation_fn", accumulation_fn)
        self._accumulate = accumulation_fn

    @property
    def is_tree_sum(self) -> bool:
        return self._accumulate is None and super().is_tree_sum

    def root(self, ends: Ends) -> Device:
        return self._reduce_to or ends.destinations[0]

    def is_one_sum(self, ends: Ends) -> bool:
        return self._accumulate is None and super().is_one_sum(ends)

    def reduce_dense(
        self, op: ReduceOp, batch: Batch, ends: Ends, options: CommunicationOptions
    ) -> list[tuple[Tensor, ...]]:
        is_alone = len(ends.sources) == 1 and ends.sources == ends.destinations
        if self._accumulate is None or is_alone:
            return super().reduce_dense(op, batch, ends, options)
        return [self._reduce_with(self._accumulate, op, tensors, ends) for tensors in batch]

    def _reduce_with(
        self, accumulate: AccumulationFn, op: ReduceOp, tensors: Sequence[Tensor], ends: Ends
    ) -> tuple[Tensor, ...]:
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise UnsupportedError(
                f"With an `accumulation_fn` the operation is {ReduceOp.SUM} (what it returns) or "
                f"{ReduceOp.MEAN} (divided by the number of replicas), got {op}."
            )
        route = self.route(ends)
        total = accumulate([tensor.detach().to(route.root) for tensor in tensors])
        check_instance("accumulation_fn(tensors)", total, Tensor, "a tensor")
        if op is ReduceOp.MEAN:
            total = divide(total, len(tensors), total.dtype)
        return tuple(total.detach().to(output, copy=True) for output in route.outputs)
