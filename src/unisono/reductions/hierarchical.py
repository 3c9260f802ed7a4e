"""`HierarchicalCopyAllReduce`: inside groups of near devices first, then between their roots."""

from __future__ import annotations

from unisono.algorithms import Schedule, two_level
from unisono.devices import Device, near_groups
from unisono.reductions.all_reduce import AllReduce


class HierarchicalCopyAllReduce(AllReduce):
    """All-reduces in two levels, which sends little between groups of devices that are far apart.

    The groups follow the links of the machine where they are known (the two quads of a DGX-1) and
    are two halves where not. Any number of devices is right, odd ones too. Successive packs take
    successive devices as roots, so that all links are used: as many packs as devices is a good
    number on several GPUs.

    Args:
        num_packs: How many packs the values of a batch are cut into; 0 reduces each on its own.
            Or a rule of `unisono.packing`.
    """

    def all_reduce_schedule(self, devices: tuple[Device, ...], turn: int) -> Schedule:
        return two_level(near_groups(devices), turn=turn)
