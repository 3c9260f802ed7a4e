"""`PerDevice`: a value by device, as values were written before replicas had numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.arguments import check_instance
from unisono.devices import DeviceLike
from unisono.values import PerReplica


class PerDevice(PerReplica):
    """One value a device.

    Args:
        index: The values by device. Replica ids follow the order of the mapping.
    """

    __slots__ = ()

    def __init__(self, index: Mapping[DeviceLike, Any]) -> None:
        check_instance("index", index, Mapping, "a dict of values by device")
        super().__init__(index.values(), tuple(index))
