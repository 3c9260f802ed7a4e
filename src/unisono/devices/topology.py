"""How the GPUs of a host are joined: a value that can be recorded and read back.

A link is written as `nvidia-smi topo -m` does, with a star where the two GPUs cannot reach each
other's memory (`SYS*`): CUDA takes a copy between them through the memory of the host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from unisono.errors import DeviceError


class LinkKind(Enum):
    """What joins two GPUs, from near to far."""

    SAME = "X"
    NVSWITCH = "NVS"
    NVLINK = "NV"
    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"
    UNKNOWN = "?"

    @property
    def words(self) -> str:
        """What the abbreviation means."""
        return _WORDS[self]


_FROM_NEAR_TO_FAR = tuple(LinkKind)
_WORDS = {
    LinkKind.SAME: "the GPU itself",
    LinkKind.NVSWITCH: "that many NVLinks, through NVSwitch",
    LinkKind.NVLINK: "that many NVLinks",
    LinkKind.PIX: "one PCIe bridge",
    LinkKind.PXB: "several PCIe bridges",
    LinkKind.PHB: "the PCIe host bridge of a CPU",
    LinkKind.NODE: "several host bridges of one NUMA node",
    LinkKind.SYS: "the connection between NUMA nodes",
    LinkKind.UNKNOWN: "not known",
}
_LINK = re.compile(r"([A-Z]+|\?)(\d*)(\*?)")
_HOW_TO_RECORD = "`unisono info --json > machine.json` records one."


class Link(NamedTuple):
    """What joins two GPUs, how many NVLinks, and whether they reach each other's memory."""

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
    """A GPU, and what joins it to each GPU of its host.

    Attributes:
        name: What its maker calls it.
        num_bytes: The size of its memory.
        links: By GPU, itself among them.
        pci_bus_id: Where on the bus it is, if known.
        numa_node: The NUMA node of the host it is nearest to, if known.
    """

    name: str
    num_bytes: int
    links: tuple[Link, ...]
    pci_bus_id: str | None = None
    numa_node: int | None = None


@dataclass(frozen=True)
class Topology:
    """The GPUs of a host, and what joins them.

    Attributes:
        gpus: In the order in which torch counts them.
        source: In words, who says so.
    """

    gpus: tuple[Gpu, ...]
    source: str

    def link(self, a: int, b: int) -> Link:
        """Returns what joins two GPUs; nobody knows that of a GPU that is not here."""
        if a == b:
            return Link(LinkKind.SAME)
        if max(a, b) >= len(self.gpus):
            return Link(LinkKind.UNKNOWN, is_peer=False)
        return self.gpus[a].links[b]

    def to_json(self) -> dict[str, Any]:
        """Returns a recording, made of what JSON knows."""
        gpus = [{**vars(gpu), "links": [str(link) for link in gpu.links]} for gpu in self.gpus]
        return {"source": self.source, "gpus": gpus}

    @classmethod
    def from_json(cls, recording: Mapping[str, Any]) -> Topology:
        """Reads a `recording`: what `to_json` returned.

        Raises:
            DeviceError: If it is none, or its links do not go together.
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
