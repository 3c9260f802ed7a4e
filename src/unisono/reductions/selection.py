"""Which reduction suits which devices."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.devices import DeviceLike, resolve, this_machine
from unisono.reductions.cross_device_ops import CrossDeviceOps
from unisono.reductions.nccl import NcclAllReduce
from unisono.reductions.one_device import ReductionToOneDevice


def select_cross_device_ops(devices: Sequence[DeviceLike]) -> CrossDeviceOps:
    """Returns NCCL for different GPUs, and the reduction on one device for everything else."""
    machine = this_machine()
    places = [machine.torch_device(resolve(device)) for device in devices]
    are_gpus = all(place.type == "cuda" for place in places)
    if are_gpus and 1 < len(places) == len(set(places)):
        return NcclAllReduce()
    return ReductionToOneDevice()
