"""Which ranks are on one host, really: not by its name, which several may share."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.communicators.headers import ranks_in_words
from unisono.errors import CommunicationError
from unisono.system import boot_id, namespace, user

ON_ONE_HOST = "which are on one host"


def host_identity() -> str:
    """Returns a text that two processes share if they can share memory.

    That takes one boot of one kernel, one user, the same namespaces and the same /dev/shm.
    Containers and network namespaces of one machine count as separate hosts.
    """
    if (boot := boot_id()) is None:
        return f"{platform.node()} {uuid.getnode()} {user()}"
    namespaces = [namespace(kind) for kind in ("net", "ipc", "pid")]
    memory = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else None
    return " ".join([boot, *namespaces, str(memory), user()])


@dataclass(frozen=True)
class Layout:
    """The ranks by host, hosts in the order of their first rank."""

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, identities: Sequence[str]) -> Layout:
        """Groups ranks, given the host of each."""
        hosts: dict[str, list[int]] = {}
        for rank, identity in enumerate(identities):
            hosts.setdefault(identity, []).append(rank)
        return cls(tuple(map(tuple, hosts.values())))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def is_regular(self) -> bool:
        """Whether all hosts have the same number of ranks, which follow each other."""
        in_order = [rank for host in self.hosts for rank in host]
        return in_order == list(range(self.size)) and len(set(map(len, self.hosts))) == 1

    def place(self, rank: int) -> tuple[int, int]:
        """Returns the number of the host of `rank`, and its position there."""
        host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        return host, self.hosts[host].index(rank)

    def __str__(self) -> str:
        return " | ".join(", ".join(map(str, host)) for host in self.hosts)


def named_globally(
    error: CommunicationError, ranks: Sequence[int], which: str = ON_ONE_HOST
) -> CommunicationError:
    """Returns an error of some ranks, which counts them from 0, with the numbers of the whole."""
    return type(error)(
        f"Among {ranks_in_words(ranks)}, {which} and counted from 0 there: {error}",
        [ranks[rank] for rank in error.ranks],
    )
