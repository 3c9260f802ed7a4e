"""`HierarchicalCopyAllReduce`: inside groups of near devices first, then between their roots."""

from __future__ import annotations

from unisono.algorithms import Schedule, two_level
from unisono.devices import Device, near_groups
from unisono.reductions.all_reduce import AllReduce


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
