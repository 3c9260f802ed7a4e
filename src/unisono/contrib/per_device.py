"""`PerDevice`: a value by device, as values were written before replicas had numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.arguments import check_instance
from unisono.devices import DeviceLike, resolve
from unisono.errors import DeviceError
from unisono.values import PerReplica


class PerDevice(PerReplica):
    """One value per device.

    Args:
        index: The values by device. Replica ids follow the order of the mapping.
    """

    __slots__ = ()

    def __init__(self, index: Mapping[DeviceLike, Any]) -> None:
        check_instance("index", index, Mapping, "a mapping from devices to values")
        super().__init__(index.values(), tuple(index))

    def get(self, device: DeviceLike | None = None) -> Any:
        """Returns the value on a device.

        Args:
            device: The device; on a replica, None means the device of that replica.

        Raises:
            DeviceError: If there is no value on it.
        """
        if device is None:
            return self.value()
        wanted = resolve(device)
        if wanted not in self.devices:
            here = ", ".join(map(str, self.devices))
            raise DeviceError(
                f"This `PerDevice` has values on {here}, but none on {wanted}. Ask for one of its "
                "devices."
            )
        return self.values[self.devices.index(wanted)]
