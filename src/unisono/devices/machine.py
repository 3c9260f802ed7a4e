"""What this host has: its GPUs, and which devices share a memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from unisono.arguments import in_words
from unisono.devices.device import Device, DeviceLike, cpu_slots
from unisono.errors import DeviceError

if TYPE_CHECKING:
    from unisono.devices.topology import Topology


@dataclass(frozen=True)
class Machine:
    """The devices of a host.

    Attributes:
        gpus: The torch device behind `cuda:0`, `cuda:1`, ...; several may be the same GPU.
        are_shared: Whether all CPU devices share one memory, and all devices on one GPU too, as in
            reality.
        recorded: The links between the GPUs, if they are not those of this host.
    """

    gpus: tuple[torch.device, ...]
    are_shared: bool = True
    recorded: Topology | None = None

    def torch_device(self, device: Device) -> torch.device:
        """Returns where torch keeps the tensors of `device`."""
        if device.type == "cpu":
            return _CPU
        if device.index < len(self.gpus):
            return self.gpus[device.index]
        have = ", ".join(f"cuda:{i}" for i in range(len(self.gpus))) or "no GPU"
        raise DeviceError(
            f"There is no {device} on this host, which has {have}. Use one of these, or CPU "
            "replicas: cpu:0, cpu:1, and so on."
        )

    def memory(self, device: Device) -> torch.device | Device:
        """Returns the memory of `device`. Devices with equal memories need no copies."""
        return self.torch_device(device) if self.are_shared else device


_CPU = torch.device("cpu")
_lock = threading.Lock()
# Replaced as a whole, because other threads read it.
_pretended: tuple[Machine, ...] = ()


def this_machine() -> Machine:
    """Returns this machine, or the one that `unisono.testing` pretends to have."""
    pretended = _pretended
    return pretended[-1] if pretended else _real_machine()


@functools.cache
def _real_machine() -> Machine:
    if not torch.cuda.is_available():
        return Machine(gpus=())
    return Machine(tuple(torch.device("cuda", i) for i in range(torch.cuda.device_count())))


@contextmanager
def pretend(**changes: object) -> Iterator[Machine]:
    """Makes every thread of this process see another machine until the block ends."""
    global _pretended
    machine = replace(this_machine(), **changes)  # type: ignore[arg-type]
    with _lock:
        _pretended = (*_pretended, machine)
    try:
        yield machine
    finally:
        with _lock:
            _pretended = tuple(one for one in _pretended if one is not machine)


def as_recorded(topology: Topology) -> AbstractContextManager[Machine]:
    """Within the block, this process sees the GPUs of a recorded `topology`. Use it to ask what
    Unisono would choose there.
    """
    gpus = tuple(torch.device("cuda", index) for index in range(len(topology.gpus)))
    return pretend(gpus=gpus, recorded=topology)


def resolve(spec: DeviceLike) -> Device:
    """Reads a device name and checks that this host has the device."""
    device = Device.parse(spec)
    if device.type != "cpu":
        this_machine().torch_device(device)
    return device


def replica_devices(devices: Any) -> tuple[Device, ...]:
    """Reads the devices, one per replica. A single device means one replica."""
    if isinstance(devices, (str, torch.device, Device)):
        num_gpus = len(this_machine().gpus)
        # torch reads "cuda" as the current GPU, but the caller may mean all GPUs.
        if num_gpus > 1 and str(devices).strip("/").lower() in ("cuda", "gpu"):
            raise DeviceError(
                f"`devices={devices!r}` may mean one GPU or all {num_gpus} of this host. Write "
                "`devices=None` for all of them, or `devices=['cuda:0']` for one."
            )
        devices = [devices]
    try:
        iterator = iter(devices)
    except (TypeError, RuntimeError):
        num_replicas = devices if type(devices) is int and 0 < devices <= 8 else 2
        kind = "cuda" if this_machine().gpus else "cpu"
        names = ", ".join(f"'{kind}:{index}'" for index in range(num_replicas))
        raise DeviceError(
            f"`devices` must be a list with one device per replica, got {in_words(devices)}. Write "
            f"`devices=[{names}]` for {num_replicas} replicas, or None for all GPUs."
        ) from None
    resolved = tuple(map(resolve, iterator))
    if not resolved:
        raise DeviceError(
            "`devices` is empty, but a strategy needs at least one device. Pass None for all GPUs."
        )
    if len(set(resolved)) < len(resolved):
        names = ", ".join(map(str, resolved))
        raise DeviceError(
            f"Each device can have only one replica, got {names}. Name every device once; CPU "
            "replicas are cpu:0, cpu:1, and so on, and two replicas on one GPU cuda:0, cuda:0#1."
        )
    return resolved


def spread(devices: tuple[Device, ...], num_replicas: int) -> tuple[Device, ...]:
    """Returns one device per replica. If there are fewer devices, replicas share them.

    Neighbors share a device. Each CPU replica has its own slot.

    >>> spread((Device("cpu", 0),), 2), spread((Device("cuda", 0), Device("cuda", 1)), 3)
    ((cpu:0, cpu:1), (cuda:0, cuda:0#1, cuda:1))
    """
    if num_replicas <= len(devices):
        return devices[:num_replicas]
    if all(device.type == "cpu" for device in devices):
        return cpu_slots(num_replicas)
    share, num_larger = divmod(num_replicas, len(devices))
    return tuple(
        Device(device.type, device.index, device.job, device.task, slot)
        for i, device in enumerate(devices)
        for slot in range(share + (i < num_larger))
    )


def default_devices() -> tuple[Device, ...]:
    """Returns all GPUs of this host, or one CPU device."""
    num_gpus = len(this_machine().gpus)
    return tuple(Device("cuda", i) for i in range(num_gpus)) or (Device("cpu", 0),)
