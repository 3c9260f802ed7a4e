"""Device names, the devices of this host, and which of them are near each other.

What knows the links between GPUs is loaded when somebody names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.devices.device import Device, DeviceLike, cpu_slots
from unisono.devices.machine import (
    Machine,
    as_recorded,
    default_devices,
    pretend,
    replica_devices,
    resolve,
    spread,
    this_machine,
)
from unisono.devices.streams import Trail, lend
from unisono.sharing import names_of as _names_of

if TYPE_CHECKING:
    from unisono.devices.groups import Groups, halves, linked_groups, near_groups
    from unisono.devices.topology import Gpu, Link, LinkKind, Topology
else:
    __getattr__ = _names_of(__name__, "groups", "topology")

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
