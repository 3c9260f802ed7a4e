"""Private process groups of torch.distributed: how they are made, and how they end."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from unisono.communicators.headers import ranks_in_words
from unisono.communicators.stores import coordinator_address, say_to_all
from unisono.errors import UnsupportedError, WorkerTimeoutError

_GRACE_SECONDS = 2.0
# A tag that no other message has.
_UNUSED_TAG = 0x7FFFFFFF


def make_gloo_group(
    store: Store, rank: int, size: int, *, host: str | None, timeout_seconds: float
) -> Any:
    """Returns a group of its own, apart from torch's default one.

    The network is the one that leads to the coordinator, whatever the host is called;
    `GLOO_SOCKET_IFNAME` names another. `GLOO_DEVICE_TRANSPORT=TCP_TLS`, with
    `GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY`, `..._CERT` and `..._CA_FILE`, encrypts what is sent, where
    torch was built with it.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = host or address_towards(coordinator_address(store))
    said = say_to_all(
        PrefixStore("address", store), rank, size, own, timeout_seconds=timeout_seconds
    )
    group: Any = distributed.ProcessGroupGloo
    options = group._Options()
    # The watch gives up before Gloo does, and can say for whom it has waited.
    options._timeout = timedelta(seconds=timeout_seconds + _GRACE_SECONDS)
    options._devices = [_device(interface, own if host else reachable(own, said))]
    # As many collectives as are under way at a time.
    options._threads = 4
    try:
        return group(PrefixStore("gloo", store), rank, size, options)
    except DistStoreError as error:
        # It names the key that nobody wrote, which ends with the rank that should have.
        late = [int(number) for number in re.findall(r"/gloo/\d+/(\d+)", str(error))]
        late = late or [other for other in range(size) if other != rank]
        raise WorkerTimeoutError(
            f"Rank {rank} waited {timeout_seconds:g} s for {ranks_in_words(late)} of {size} to "
            "join, which had said before that they are there. Look at their logs.",
            late,
        ) from error


def _device(interface: str, address: str) -> Any:
    group: Any = distributed.ProcessGroupGloo
    try:
        if interface:
            return group.create_device(interface=interface)
        return group.create_device(hostname=address)
    except RuntimeError as error:
        transport = os.environ.get("GLOO_DEVICE_TRANSPORT")
        if transport is None:
            raise
        raise UnsupportedError(
            f"GLOO_DEVICE_TRANSPORT is {transport!r}, which Gloo in torch {torch.__version__} "
            f"could not open ({str(error).splitlines()[0]}). TCP_TLS needs a torch that was built "
            "with USE_GLOO_WITH_OPENSSL, and files for key, certificate and authority. Unset it to "
            "send unencrypted."
        ) from error


def make_mpi_group(rank: int, size: int) -> Any:
    """Returns the group of all processes that MPI has started, if torch knows MPI."""
    if not distributed.is_mpi_available():
        raise UnsupportedError(
            f"The backend 'mpi' needs a torch that was built with MPI; torch {torch.__version__} "
            "was not. Workers started by mpirun can talk through 'gloo' or 'nccl'."
        )
    group: Any = distributed.ProcessGroupMPI.create([])
    if (group.rank(), group.size()) != (rank, size):
        raise UnsupportedError(
            f"MPI counts this process as rank {group.rank()} of {group.size()}, the cluster as "
            f"rank {rank} of {size}. Start the workers with mpirun in the order of the cluster."
        )
    return group


def break_connections(group: Any) -> None:
    """Ends everything that a Gloo group waits for, with an error.

    Gloo gives up all connections when a receive is too late, and offers no other way.
    """
    peer = (group.rank() + 1) % group.size()
    try:
        receive = group.recv([torch.empty(1)], peer, _UNUSED_TAG)
        receive.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


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

    Beside the coordinator the way to it is the loopback, which is of no use to another host.
    """
    outside = [address for address in all_addresses if not _is_loopback(address)]
    return address_towards((outside[0], 1)) if outside and _is_loopback(own) else own


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        # A host name, which somebody has given for others to use.
        return False
