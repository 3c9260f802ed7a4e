"""The constants of the model: the cost of a message on a link, and of a sum in memory.

A link that carries m messages and n bytes at once is busy for

    latency + (m - 1) overhead + n / bandwidth

The latency is paid once: messages of one round are under way together. A rank that sends many of
them still needs the overhead for each further one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from unisono.errors import TuningError

# A guess, if only pairs were measured: each further message costs this part of the first.
OVERHEAD_SHARE = 0.2


@dataclass(frozen=True)
class Link:
    """A link between two memories.

    Args:
        latency: Seconds from the beginning of a message to its end, if it is empty.
        bandwidth: Bytes per second.
        overhead: Seconds for each further message of a round; a fifth of the latency if not given.
    """

    latency: float
    bandwidth: float
    overhead: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.overhead):
            object.__setattr__(self, "overhead", OVERHEAD_SHARE * self.latency)
        constants = (self.latency, self.bandwidth, self.overhead)
        are_right = all(map(math.isfinite, constants)) and min(constants) >= 0
        if not are_right or self.bandwidth == 0:
            raise TuningError(
                "A link has a latency and an overhead of 0 s or more and a bandwidth above 0 B/s, "
                f"got {self.latency}, {self.overhead} and {self.bandwidth}. Measure it again with "
                "`unisono tune`."
            )

    def seconds(self, num_messages: int, num_bytes: float) -> float:
        """Returns how long the link is busy with messages that are sent at the same time."""
        if num_messages == 0:
            return 0.0
        further = (num_messages - 1) * self.overhead
        return self.latency + further + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Equal hosts, and the costs of their links.

    Args:
        num_hosts: The number of hosts.
        ranks_per_host: The number of ranks per host.
        inside: The link that each rank has inside its host.
        between: The link that each host has to the others, which its ranks share.
        memory_rate: Bytes per second that a rank reads and writes in a sum.
    """

    num_hosts: int
    ranks_per_host: int
    inside: Link
    between: Link
    memory_rate: float

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.ranks_per_host < 1 or self.memory_rate <= 0:
            raise TuningError(
                "A cluster has at least one host with one rank and a memory rate above 0 B/s, got "
                f"{self.num_hosts} hosts of {self.ranks_per_host} and {self.memory_rate} B/s."
            )


class Line(NamedTuple):
    """Seconds as a linear function of bytes."""

    latency: float
    per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds for this number of bytes."""
        return self.latency + self.per_byte * num_bytes
