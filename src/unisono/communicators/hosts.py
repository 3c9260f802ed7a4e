"""Which ranks are on one host, not by its name, which several may share, and its address."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.headers import ranks_in_words
from unisono.communicators.stores import coordinator_address, say_to_all
from unisono.errors import CommunicationError, UnsupportedError
from unisono.system import boot_id, interface_address, namespace, user

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


def own_address(store: Store, rank: int, size: int, *, timeout_seconds: float) -> str:
    """Returns the address of this rank, on the network that leads to the coordinator."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = (
        address_of_interface(interface)
        if interface
        else address_towards(coordinator_address(store))
    )
    said = say_to_all(
        PrefixStore("address", store), rank, size, own, timeout_seconds=timeout_seconds
    )
    return own if interface else reachable(own, said)


def address_of_interface(name: str) -> str:
    """Returns the IPv4 address of a network interface, such as eth0."""
    try:
        return interface_address(name)
    except OSError as error:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise UnsupportedError(
            f"GLOO_SOCKET_IFNAME is {name!r}, which has no IPv4 address here ({error}). This host "
            f"has {there}: name one of them, or unset the variable."
        ) from error


def address_towards(peer: tuple[str, int] | None) -> str:
    """Returns the address of this host on the network that leads to `peer`."""
    if peer is None:
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Sends nothing; it only chooses a route.
        probe.connect(address)
        return str(probe.getsockname()[0])


def reachable(own: str, all_addresses: Sequence[str]) -> str:
    """Returns an address that others reach, where `own` is one that only this host does.

    On the host of the coordinator that is the loopback, which other hosts cannot reach.
    """
    outside = [address for address in all_addresses if not is_loopback(address)]
    return address_towards((outside[0], 1)) if outside and is_loopback(own) else own


def is_loopback(address: str) -> bool:
    """Returns whether only this host reaches an IP address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        # A host name, which somebody has given for others to use.
        return False
