"""The parts of `pynvml` and `torch.cuda` that read a topology, for GPUs that are not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unisono.devices import LinkKind, Topology


class FakeNvml:
    """Answers as the module `pynvml` would on the machine of `topology`.

    A handle is the index of a GPU in it, and is only to be had by the UUID.
    """

    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_TOPOLOGY_INTERNAL = 0
    NVML_TOPOLOGY_SINGLE = 10
    NVML_TOPOLOGY_MULTIPLE = 20
    NVML_TOPOLOGY_HOSTBRIDGE = 30
    NVML_TOPOLOGY_NODE = 40
    NVML_TOPOLOGY_SYSTEM = 50

    class NVMLError(Exception):
        """What every function of NVML fails with."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.num_users = 0

    def nvmlInit(self) -> None:
        self.num_users += 1

    def nvmlShutdown(self) -> None:
        self.num_users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-uuid-"))

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._topology.gpus[handle].name

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=self._topology.gpus[handle].num_bytes)

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000{self._topology.gpus[handle].pci_bus_id}".upper())

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        ends = self._ends(handle)
        if link > len(ends):
            raise self.NVMLError("Invalid Argument")
        # The last link is there, but leads nowhere.
        return int(link < len(ends))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        is_switch = self._ends(handle)[link] is None
        return self.NVML_NVLINK_DEVICE_TYPE_SWITCH if is_switch else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        end = self._ends(handle)[link]
        assert end is not None
        return self.nvmlDeviceGetPciInfo(end)

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return {
            LinkKind.PIX: self.NVML_TOPOLOGY_SINGLE,
            LinkKind.PXB: self.NVML_TOPOLOGY_MULTIPLE,
            LinkKind.PHB: self.NVML_TOPOLOGY_HOSTBRIDGE,
            LinkKind.NODE: self.NVML_TOPOLOGY_NODE,
            LinkKind.SYS: self.NVML_TOPOLOGY_SYSTEM,
        }[self._topology.link(a, b).kind]

    def _ends(self, handle: int) -> list[int | None]:
        """Where the NVLinks of a GPU lead: to a GPU, or to a switch (None)."""
        links = self._topology.gpus[handle].links
        if any(link.kind is LinkKind.NVSWITCH for link in links):
            return [None] * max(link.num_nvlinks for link in links)
        return [other for other, link in enumerate(links) for _ in range(link.num_nvlinks)]


def torch_sees(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `torch.cuda` tell of the GPUs of `topology`."""
    properties = [
        SimpleNamespace(name=gpu.name, total_memory=gpu.num_bytes, uuid=f"uuid-{index}")
        for index, gpu in enumerate(topology.gpus)
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda a, b: topology.link(a, b).is_peer
    )


def write_numa_nodes(topology: Topology, folder: Path) -> Path:
    """Writes what Linux says of each GPU, and returns the folder."""
    for gpu in topology.gpus:
        assert gpu.pci_bus_id is not None
        (folder / gpu.pci_bus_id).mkdir()
        node = -1 if gpu.numa_node is None else gpu.numa_node
        (folder / gpu.pci_bus_id / "numa_node").write_text(f"{node}\n")
    return folder
