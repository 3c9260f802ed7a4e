"""`AllReduce`: the values of a batch travel in packs, each pack with another root."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.algorithms import Schedule, one_device, run, two_level
from unisono.arguments import check_int
from unisono.devices import Device, near_groups
from unisono.errors import UnsupportedError
from unisono.kernels import in_memory_order
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import BytesPerPack, NoPacking, NumPacks, PackingRule, PackLayout, Spec
from unisono.reductions.scheduled import Batch, Ends, ScheduledOps


class AllReduce(ScheduledOps):
    """A reduction whose results go to the devices that the values come from.

    Values of one dtype are put end to end on each device, cut into packs, and each pack is reduced
    on its own; `bytes_per_pack` in the options of a call takes the place of the rule given here.
    Packs are made only where values travel between memories, and never change a result. Values
    that go to other devices than their own meet on the first of these.

    Args:
        num_packs: How many packs the values of a batch are cut into; 0 reduces each on its own.
            Or a rule of `unisono.packing`.
    """

    def __init__(self, num_packs: int | PackingRule = 1) -> None:
        super().__init__()
        self._packing = packing_of(num_packs)

    def all_reduce_schedule(self, devices: tuple[Device, ...], turn: int) -> Schedule:
        """Returns the schedule among `devices`; with each `turn` another one may be the root."""
        return one_device(len(devices), root=turn % len(devices), destinations=range(len(devices)))

    def schedule(self, ends: Ends, places: Sequence[Device], turn: int) -> Schedule:
        if is_all_reduce(ends):
            return self.all_reduce_schedule(ends.sources, turn)
        return super().schedule(ends, places, turn)

    def reduce_dense(
        self, op: ReduceOp, batch: Batch, ends: Ends, options: CommunicationOptions
    ) -> list[tuple[Tensor, ...]]:
        if not is_all_reduce(ends) or self.route(ends).plan.num_copies == 0:
            return super().reduce_dense(op, batch, ends, options)
        rule = BytesPerPack(options.bytes_per_pack) if options.bytes_per_pack else self._packing
        layout = rule.layout([Spec.of(tensors[0]) for tensors in batch])
        totals = self._packed(op, layout, batch, ends)
        return list(zip(*map(layout.unpack, totals), strict=True))

    def reduce_in_place(
        self, reduce_op: ReduceOp, batch: Sequence[Sequence[Tensor]], devices: tuple[Device, ...]
    ) -> bool:
        if super().reduce_in_place(reduce_op, batch, devices):
            return True
        ends = Ends(devices, devices)
        is_sent = self.reads_values and self.route(ends).plan.num_copies > 0
        batch = [in_memory_order(tensors) for tensors in batch]
        if not is_sent or not all(map(_can_be_written, batch)):
            return False
        layout = self._packing.layout([Spec.of(tensors[0]) for tensors in batch])
        totals = self._packed(reduce_op, layout, batch, ends)
        for own, total in zip(zip(*batch, strict=True), totals, strict=True):
            layout.write(total, own)
        return True

    def _packed(
        self, op: ReduceOp, layout: PackLayout, batch: Sequence[Sequence[Tensor]], ends: Ends
    ) -> list[tuple[Tensor, ...]]:
        """Returns the reduced packs, by destination."""
        by_replica = [layout.pack(tensors) for tensors in zip(*batch, strict=True)]
        packs = list(zip(*by_replica, strict=True))
        return list(zip(*self.reduce_packs(op, packs, ends), strict=True))

    def reduce_packs(self, op: ReduceOp, packs: Batch, ends: Ends) -> list[tuple[Tensor, ...]]:
        """Reduces packs, one tensor per replica in each, and returns one per destination."""
        routes = [self.route(ends, turn % len(ends.sources)) for turn in range(len(packs))]
        return [
            run(route.plan, op, [pack], route.places)[0]
            for route, pack in zip(routes, packs, strict=True)
        ]


def _can_be_written(tensors: Sequence[Tensor]) -> bool:
    """Whether a result of floats, one per replica, can be written over the values."""
    first = tensors[0]
    return first.is_floating_point() and all(
        one.dtype == first.dtype and one.shape == first.shape and one.is_contiguous()
        for one in tensors
    )


def is_all_reduce(ends: Ends) -> bool:
    """Whether results go just where the values are, each device once, in any order."""
    return set(ends.sources) == set(ends.destinations) and len(set(ends.sources)) == len(
        ends.sources
    ) == len(ends.destinations)


def packing_of(num_packs: int | PackingRule) -> PackingRule:
    """Returns the rule for a number of packs, 0 for none; a rule is returned as it is."""
    if hasattr(num_packs, "layout"):
        return num_packs
    if check_int("num_packs", num_packs) < 0:
        raise UnsupportedError(
            f"`num_packs` must be 0 (no packing) or the number of packs to make, got {num_packs}."
        )
    return NumPacks(num_packs) if num_packs else NoPacking()


class HierarchicalCopyAllReduce(AllReduce):
    """All-reduces in two levels, so that little is sent between distant groups of devices.

    The groups follow the links of the machine, such as the two quads of a DGX-1. If the links are
    unknown, there are two halves. Any number of devices works. Successive packs use successive
    devices as roots, so on several GPUs, use one pack per device.

    Args:
        num_packs: How many packs to split a batch into; 0 reduces each value alone. Or a rule of
            `unisono.packing`.
    """

    def all_reduce_schedule(self, devices: tuple[Device, ...], turn: int) -> Schedule:
        return two_level(near_groups(devices), turn=turn)
