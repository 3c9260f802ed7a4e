"""Joining the other workers of a job."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.cluster import Address, Membership, WorkerCard, meet, open_store
from unisono.communicators import (
    DEFAULT_TIMEOUT_SECONDS,
    Communicator,
    IdentityCommunicator,
    connect,
    slice_of,
)
from unisono.devices import Device, default_devices
from unisono.options import CommunicationOptions


@dataclass(frozen=True)
class Place:
    """Where the store of a job is."""

    address: str
    restart_count: int


# One process may join a job several times: it serves, or is connected to, one store all the while.
_stores: dict[Place, Store] = {}
_lock = threading.Lock()


def join(membership: Membership, num_replicas: int, options: CommunicationOptions) -> Communicator:
    """Meets all workers of the job, and returns what connects them."""
    if membership.size == 1:
        return IdentityCommunicator()
    timeout = options.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
    store = _store(membership, timeout)
    # Counted where a worker that is started anew finds it too.
    number = store.add(f"joined/{membership.rank}", 1)
    own = PrefixStore(f"join/{number}", store)
    meet(PrefixStore("meet", own), WorkerCard.of(membership, num_replicas), timeout)
    return connect(
        PrefixStore("connect", own),
        membership.rank,
        membership.size,
        timeout_seconds=timeout,
        implementation=options.implementation,
    )


def _store(membership: Membership, timeout_seconds: float) -> Store:
    place = Place(membership.coordinator, membership.restart_count)
    with _lock:
        if place not in _stores:
            _stores[place] = open_store(membership, timeout_seconds)
        return _stores[place]


def led_by(membership: Membership, rank: int) -> Membership:
    """Returns the same place in a job whose store is at the address of another worker."""
    if rank == membership.coordinator_rank or membership.size == 1:
        return membership
    chiefs = membership.spec.job_tasks("chief") if "chief" in membership.spec.jobs else []
    address = Address.parse([*chiefs, *membership.spec.job_tasks("worker")][rank])
    return replace(
        membership,
        coordinator_rank=rank,
        coordinator_host=address.host,
        coordinator_port=address.port,
    )


def local_devices(membership: Membership) -> tuple[Device, ...]:
    """Returns the devices of this worker: all GPUs, shared with the other workers of its host."""
    devices = default_devices()
    if membership.local_size == 1 or devices[0].type == "cpu":
        return devices
    share = devices[slice_of(membership.local_rank, membership.local_size, len(devices))]
    return share or (devices[membership.local_rank % len(devices)],)
