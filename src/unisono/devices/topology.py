"""The links between the GPUs of a host: read from NVML or torch, recorded and read back.

Links are written as in `nvidia-smi topo -m`. A star (`SYS*`) means that the two GPUs cannot access
each other's memory, so CUDA copies through host memory.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.errors import DeviceError

_logger = logging.getLogger(__name__)
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_SWITCH = "switch"


class LinkKind(Enum):
    """The kinds of links between two GPUs, from near to far."""

    SAME = "X"
    NVSWITCH = "NVS"
    NVLINK = "NV"
    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"
    UNKNOWN = "?"


_FROM_NEAR_TO_FAR = tuple(LinkKind)
_LINK = re.compile(r"([A-Z]+|\?)(\d*)(\*?)")
_HOW_TO_RECORD = "`unisono info --json > machine.json` records one."


class Link(NamedTuple):
    """The link between two GPUs: its kind, the number of NVLinks, and peer access."""

    kind: LinkKind
    num_nvlinks: int = 0
    is_peer: bool = True

    @classmethod
    def parse(cls, text: str) -> Link:
        """Reads a link as it is printed: `X`, `NV2`, `SYS*`."""
        match = _LINK.fullmatch(text)
        kinds = [kind for kind in LinkKind if match and kind.value == match[1]]
        has_number = bool(match and match[2])
        if not match or not kinds or has_number != kinds[0].value.startswith("NV"):
            known = ", ".join(kind.value for kind in LinkKind)
            raise DeviceError(
                f"A link is one of {known}, with a number after NV and NVS and perhaps a star, got "
                f"{text!r}."
            )
        return cls(kinds[0], int(match[2] or 0), not match[3])

    @property
    def distance(self) -> tuple[int, bool]:
        """Orders links from near to far."""
        return _FROM_NEAR_TO_FAR.index(self.kind), not self.is_peer

    def __str__(self) -> str:
        return f"{self.kind.value}{self.num_nvlinks or ''}{'' if self.is_peer else '*'}"


@dataclass(frozen=True)
class Gpu:
    """A GPU and its links to the GPUs of its host."""

    name: str
    num_bytes: int
    links: tuple[Link, ...]
    pci_bus_id: str | None = None
    numa_node: int | None = None


@dataclass(frozen=True)
class Topology:
    """The GPUs of a host and the links between them.

    Attributes:
        gpus: In the order in which torch counts them.
        source: Where the information comes from, in words.
    """

    gpus: tuple[Gpu, ...]
    source: str

    def link(self, a: int, b: int) -> Link:
        """Returns the link between two GPUs, which is unknown for a GPU that is not here."""
        if a == b:
            return Link(LinkKind.SAME)
        if max(a, b) >= len(self.gpus):
            return Link(LinkKind.UNKNOWN, is_peer=False)
        return self.gpus[a].links[b]

    def to_json(self) -> dict[str, Any]:
        """Returns a recording that can be written as JSON."""
        gpus = [{**vars(gpu), "links": [str(link) for link in gpu.links]} for gpu in self.gpus]
        return {"source": self.source, "gpus": gpus}

    @classmethod
    def from_json(cls, recording: Mapping[str, Any]) -> Topology:
        """Reads a `recording`: what `to_json` returned.

        Raises:
            DeviceError: If it is not a recording, or its links contradict each other.
        """
        try:
            gpus = tuple(
                Gpu(**{**gpu, "links": tuple(Link.parse(link) for link in gpu["links"])})
                for gpu in recording["gpus"]
            )
            topology = cls(gpus, recording["source"])
        except (KeyError, TypeError) as error:
            raise DeviceError(
                f"This is not a recorded topology ({type(error).__name__}: {error}). "
                f"{_HOW_TO_RECORD}"
            ) from error
        for index, gpu in enumerate(gpus):
            if len(gpu.links) != len(gpus):
                raise DeviceError(
                    f"A recorded topology of {len(gpus)} GPUs has {len(gpus)} links per GPU, but "
                    f"GPU {index} has {len(gpu.links)}. {_HOW_TO_RECORD}"
                )
        return topology


@functools.cache
def read_topology() -> Topology:
    """Reads the topology of this host, once."""
    if not torch.cuda.is_available():
        return Topology((), "torch, which sees no GPU")
    try:
        import pynvml
    except ImportError:
        why_not = "nvidia-ml-py is not there; pip install 'unisono[gpu]'"
    else:
        try:
            return read_nvml(pynvml)
        # Old packages and old drivers lack some functions.
        except (pynvml.NVMLError, AttributeError) as error:
            why_not = f"NVML fails: {error}"
    _logger.info("The links between GPUs are not known, only peer access (%s).", why_not)
    return read_torch(why_not)


def read_torch(why_not_nvml: str) -> Topology:
    """Reads what torch knows: the GPUs, and which can access each other's memory."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = tuple(
        Gpu(
            properties.name,
            properties.total_memory,
            tuple(
                Link(LinkKind.SAME)
                if a == b
                else Link(LinkKind.UNKNOWN, is_peer=torch.cuda.can_device_access_peer(a, b))
                for b in range(len(found))
            ),
        )
        for a, properties in enumerate(found)
    )
    return Topology(gpus, f"torch: {why_not_nvml}")


def read_nvml(nvml: Any, pci_devices: Path = _PCI_DEVICES) -> Topology:
    """Reads the GPUs that torch sees, in its order, from the module `pynvml`."""
    nvml.nvmlInit()
    try:
        # NVML counts all GPUs of the host, and torch those that CUDA_VISIBLE_DEVICES names.
        uuids = [torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())]
        cards = [_Card(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")) for uuid in uuids]
        gpus = tuple(
            Gpu(
                card.name,
                card.num_bytes,
                tuple(_link(nvml, cards, a, b) for b in range(len(cards))),
                card.bus_id,
                _numa_node(pci_devices / card.bus_id),
            )
            for a, card in enumerate(cards)
        )
    finally:
        nvml.nvmlShutdown()
    return Topology(gpus, "NVML")


class _Card:
    """What NVML says of one GPU."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.handle = handle
        self.name = _text(nvml.nvmlDeviceGetName(handle))
        self.num_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        self.bus_id = _bus_id(nvml.nvmlDeviceGetPciInfo(handle))
        self.nvlinks = Counter(
            end for link in range(nvml.NVML_NVLINK_MAX_LINKS) if (end := _end(nvml, handle, link))
        )


def _end(nvml: Any, handle: Any, link: int) -> str | None:
    """Returns where an NVLink leads: the bus id of a GPU or a switch, or None if it is not used."""
    try:
        if not nvml.nvmlDeviceGetNvLinkState(handle, link):
            return None
        kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return _SWITCH
        return _bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
    except nvml.NVMLError:
        # NVML's answer if a GPU has no such link.
        return None


def _link(nvml: Any, cards: list[_Card], a: int, b: int) -> Link:
    if a == b:
        return Link(LinkKind.SAME)
    one, other = cards[a], cards[b]
    is_peer = torch.cuda.can_device_access_peer(a, b)
    if direct := one.nvlinks[other.bus_id]:
        return Link(LinkKind.NVLINK, direct, is_peer)
    if switched := min(one.nvlinks[_SWITCH], other.nvlinks[_SWITCH]):
        return Link(LinkKind.NVSWITCH, switched, is_peer)
    ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(one.handle, other.handle)
    return Link(_kinds(nvml).get(ancestor, LinkKind.UNKNOWN), is_peer=is_peer)


def _kinds(nvml: Any) -> dict[int, LinkKind]:
    return {
        # Two chips on one board.
        nvml.NVML_TOPOLOGY_INTERNAL: LinkKind.PIX,
        nvml.NVML_TOPOLOGY_SINGLE: LinkKind.PIX,
        nvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.PXB,
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.PHB,
        nvml.NVML_TOPOLOGY_NODE: LinkKind.NODE,
        nvml.NVML_TOPOLOGY_SYSTEM: LinkKind.SYS,
    }


def _bus_id(pci: Any) -> str:
    """Writes a bus id as Linux does; NVML uses eight digits for the domain."""
    domain, rest = _text(pci.busId).lower().split(":", 1)
    return f"{domain[-4:]}:{rest}"


def _numa_node(pci_device: Path) -> int | None:
    try:
        node = int((pci_device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # Linux reports -1 if the firmware does not say.
    return node if node >= 0 else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
