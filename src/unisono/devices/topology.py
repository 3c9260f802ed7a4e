"""The links between the GPUs of a host, which can be recorded and read back.

Links are written as in `nvidia-smi topo -m`. A star (`SYS*`) means that the two GPUs cannot access
each other's memory, so CUDA copies through host memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from unisono.errors import DeviceError


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
