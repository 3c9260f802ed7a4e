"""Which reduction suits which devices."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.costs import BYTES_PER_PACK, Line, Tuning
from unisono.devices import Device, DeviceLike, resolve, this_machine
from unisono.reductions.cross_device_ops import CrossDeviceOps
from unisono.reductions.hierarchical import HierarchicalCopyAllReduce
from unisono.reductions.nccl import NcclAllReduce
from unisono.reductions.one_device import ReductionToOneDevice
from unisono.reductions.scheduled import Ends, ScheduledOps


def select_cross_device_ops(
    devices: Sequence[DeviceLike], tuning: Tuning | None = None
) -> CrossDeviceOps:
    """Returns NCCL for different GPUs, and the reduction on one device for everything else.

    Where links were measured and values have to travel, the hierarchical copy takes the place of
    the reduction on one device if a pack of gradients is predicted to take less time by it.
    """
    machine = this_machine()
    resolved = tuple(map(resolve, devices))
    places = [machine.torch_device(device) for device in resolved]
    are_gpus = all(place.type == "cuda" for place in places)
    if are_gpus and 1 < len(places) == len(set(places)):
        return NcclAllReduce()
    one_device = ReductionToOneDevice()
    num_memories = len({machine.memory(device) for device in resolved})
    if tuning is None or num_memories < max(3, len(resolved)):
        # Between two devices there is one way only.
        return one_device
    candidates = (one_device, HierarchicalCopyAllReduce())
    return min(candidates, key=lambda ops: _pack_seconds(ops, resolved, tuning))


def predicted_cost(
    ops: CrossDeviceOps, devices: tuple[Device, ...], tuning: Tuning | None
) -> Line | None:
    """Returns what an all-reduce between devices costs; None where nothing says so."""
    if tuning is None or isinstance(ops, NcclAllReduce) or not isinstance(ops, ScheduledOps):
        return None
    return ops.cost(Ends(devices, devices), tuning.devices, tuning.memory)


def _pack_seconds(ops: ScheduledOps, devices: tuple[Device, ...], tuning: Tuning) -> float:
    return ops.cost(Ends(devices, devices), tuning.devices, tuning.memory).seconds(BYTES_PER_PACK)
