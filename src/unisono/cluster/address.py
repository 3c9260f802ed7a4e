"""A host and a port, as a cluster spec writes them."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from unisono.errors import ClusterError

_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]*:[^\]\s]*)\]|(?P<name>[^\s:/\[\]]+)):(?P<port>\d+)"
)


@dataclass(frozen=True)
class Address:
    """Where a task can be reached."""

    host: str
    port: int

    @staticmethod
    def parse(text: object) -> Address:
        """Reads `host:port` or `[IPv6]:port`."""
        match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ClusterError(
                f"Cannot read the address {text!r}. Write 'host:port' with a port from 1 to 65535, "
                "and an IPv6 host in brackets: '[::1]:2222'."
            )
        return Address(match["ipv6"] or match["name"], int(match["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def derived_port(name: str) -> int:
    """Returns the port that every worker of the job `name` computes alike.

    It is 12000 plus the CRC-32 of the name modulo 20000: below the ports that Linux gives out by
    itself, which start at 32768.
    """
    return 12000 + zlib.crc32(name.encode()) % 20000
