"""What this host has: its GPUs, which devices share a memory, and which are near each other."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from unisono.arguments import in_words
from unisono.devices.device import Device, DeviceLike, cpu_slots
from unisono.devices.topology import Link, LinkKind, Topology, read_topology
from unisono.errors import DeviceError


@dataclass(frozen=True)
class Machine:
    """The devices of a host.

    Attributes:
        gpus: The torch device behind `cuda:0`, `cuda:1`, ...; several may be the same GPU.
        are_shared: Whether all CPU devices share one memory, and all devices on one GPU too, as in
            reality.
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

    @property
    def topology(self) -> Topology:
        """The links between the GPUs, by the index of their torch device."""
        return read_topology() if self.recorded is None else self.recorded

    def link(self, a: Device, b: Device) -> Link:
        """Returns the link between two devices."""
        if self.memory(a) == self.memory(b):
            return Link(LinkKind.SAME)
        if a.type != "cuda" or b.type != "cuda":
            return Link(LinkKind.UNKNOWN, is_peer=False)
        return self.topology.link(self.torch_device(a).index, self.torch_device(b).index)


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


Groups = tuple[tuple[int, ...], ...]


def near_groups(devices: Sequence[Device]) -> Groups:
    """Groups the positions of `devices` so that the farthest links are between groups.

    The devices of a group are nearer to each other than a limit: the largest one that splits the
    devices. So two sockets make two groups, and one socket is split by its PCIe switches or
    NVLinks. If all links are equal, the devices are split into two halves.
    """
    machine = this_machine()
    num_devices = len(devices)
    far = {
        (a, b): machine.link(devices[a], devices[b]).distance
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
