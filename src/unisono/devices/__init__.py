"""Device names, the devices of this host, and which of them are near each other."""

from unisono.devices.device import Device, DeviceLike, cpu_slots
from unisono.devices.machine import (
    Groups,
    Machine,
    as_recorded,
    default_devices,
    halves,
    linked_groups,
    near_groups,
    pretend,
    replica_devices,
    resolve,
    spread,
    this_machine,
)
from unisono.devices.streams import Trail, lend
from unisono.devices.topology import Gpu, Link, LinkKind, Topology

__all__ = [
    "Device",
    "DeviceLike",
    "Gpu",
    "Groups",
    "Link",
    "LinkKind",
    "Machine",
    "Topology",
    "Trail",
    "as_recorded",
    "cpu_slots",
    "default_devices",
    "halves",
    "lend",
    "linked_groups",
    "near_groups",
    "pretend",
    "replica_devices",
    "resolve",
    "spread",
    "this_machine",
]
