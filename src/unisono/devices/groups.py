"""Which devices are near each other, by the links between the GPUs of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.devices.device import Device
from unisono.devices.machine import Machine, this_machine
from unisono.devices.topology import Link, LinkKind, Topology, read_topology

Groups = tuple[tuple[int, ...], ...]


def topology_of(machine: Machine) -> Topology:
    """Returns the links between the GPUs of a host, by the index of their torch device."""
    return read_topology() if machine.recorded is None else machine.recorded


def _link(machine: Machine, a: Device, b: Device) -> Link:
    if machine.memory(a) == machine.memory(b):
        return Link(LinkKind.SAME)
    if a.type != "cuda" or b.type != "cuda":
        return Link(LinkKind.UNKNOWN, is_peer=False)
    ends = machine.torch_device(a), machine.torch_device(b)
    return topology_of(machine).link(ends[0].index, ends[1].index)


def near_groups(devices: Sequence[Device]) -> Groups:
    """Groups the positions of `devices` so that the farthest links are between groups.

    The devices of a group are nearer to each other than a limit: the largest one that splits the
    devices. So two sockets make two groups, and one socket is split by its PCIe switches or
    NVLinks. If all links are equal, the devices are split into two halves.
    """
    machine = this_machine()
    num_devices = len(devices)
    far = {
        (a, b): _link(machine, devices[a], devices[b]).distance
        for a in range(num_devices)
        for b in range(a)
    }

    def parted(limit: tuple[int, bool]) -> Groups:
        return linked_groups(num_devices, lambda a, b: far[a, b] <= limit)

    for groups in map(parted, sorted(set(far.values()), reverse=True)):
        if 1 < len(groups) < num_devices:
            return groups
    return halves(num_devices)


def linked_groups(num_devices: int, linked: Callable[[int, int], bool]) -> Groups:
    """Groups devices so that all devices of a group are linked to each other.

    Each device joins the first group that it fits. This finds the two quads of a DGX-1 (0-3 and 4-7
    fully linked, and i to i + 4). `linked` is called with a device and an earlier one.
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
    """Splits the devices in two at the largest power of two below their number."""
    if num_devices < 2:
        return (tuple(range(num_devices)),)
    middle = 1 << ((num_devices - 1).bit_length() - 1)
    return tuple(range(middle)), tuple(range(middle, num_devices))
