"""What can compute: device names, the devices of this host, and which of them are near."""

from unisono.devices.device import Device, DeviceLike, cpu_slots
from unisono.devices.machine import Machine, default_devices, pretend, resolve, this_machine
from unisono.devices.streams import Trail, lend
from unisono.devices.topology import Groups, halves, linked_groups, near_groups

__all__ = [
    "Device",
    "DeviceLike",
    "Groups",
    "Machine",
    "Trail",
    "cpu_slots",
    "default_devices",
    "halves",
    "lend",
    "linked_groups",
    "near_groups",
    "pretend",
    "resolve",
    "this_machine",
]
