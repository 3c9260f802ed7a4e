"""Which devices are near each other: the groups of a two-level reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.devices.device import Device
from unisono.devices.machine import this_machine

Groups = tuple[tuple[int, ...], ...]


def near_groups(devices: Sequence[Device]) -> Groups:
    """Groups the positions of `devices` by the direct links of this machine.

    Where the links say nothing (no links, or every device linked to every other) the devices are
    cut in two halves.
    """
    machine = this_machine()
    physical = [machine.torch_device(device) for device in devices]

    def linked(a: int, b: int) -> bool:
        if physical[a].type != "cuda" or physical[b].type != "cuda":
            return False
        return physical[a] == physical[b] or torch.cuda.can_device_access_peer(
            physical[a].index, physical[b].index
        )

    groups = linked_groups(len(devices), linked)
    return groups if 1 < len(groups) < len(devices) else halves(len(devices))


def linked_groups(num_devices: int, linked: Callable[[int, int], bool]) -> Groups:
    """Groups devices so that inside a group each is linked to each.

    Devices are taken in order and join the first group they fit, which finds the two quads of a
    DGX-1 (0-3 and 4-7 fully linked, and i to i + 4).
    """
    groups: list[list[int]] = []
    for device in range(num_devices):
        for group in groups:
            if all(linked(device, member) for member in group):
                group.append(device)
                break
        else:
            groups.append([device])
    return tuple(tuple(group) for group in groups)


def halves(num_devices: int) -> Groups:
    """Cuts the devices in two at the largest power of two below their number.

    That is where the sum's own tree parts, so each half is one whole partial sum. No device is
    left out, whatever their number.
    """
    if num_devices < 2:
        return (tuple(range(num_devices)),)
    middle = 1 << ((num_devices - 1).bit_length() - 1)
    return tuple(range(middle)), tuple(range(middle, num_devices))
