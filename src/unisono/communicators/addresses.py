"""The address by which other ranks reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.stores import coordinator_address, say_to_all
from unisono.errors import UnsupportedError
from unisono.system import interface_address


def own_address(
    store: Store, rank: int, size: int, *, host: str | None, timeout_seconds: float
) -> str:
    """Returns the address of this rank, on the network that leads to the coordinator."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = host or (
        address_of_interface(interface)
        if interface
        else address_towards(coordinator_address(store))
    )
    said = say_to_all(
        PrefixStore("address", store), rank, size, own, timeout_seconds=timeout_seconds
    )
    return own if host or interface else reachable(own, said)


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
