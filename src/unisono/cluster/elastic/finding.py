"""Where the doors of an elastic job are, for a worker that does not know whether the job runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import as_completed
from functools import partial
from typing import NamedTuple, TypeVar

from torch._C._distributed_c10d import Store

from unisono.cluster.address import Address
from unisono.cluster.elastic.doors import PURPOSE, call_door, serve_door
from unisono.cluster.elastic.generation import Generation
from unisono.cluster.membership import Membership
from unisono.communicators import STORE_ERRORS, JobStore, in_thread, tcp_store
from unisono.communicators.sockets import listening
from unisono.communicators.stores import in_background

_T = TypeVar("_T")
_SECONDS = 3.0
# Where the launcher keeps a store, the workers say there where their doors are.
_KEY = f"unisono/{PURPOSE}/doors"
_log = logging.getLogger("unisono")


class Running(NamedTuple):
    """A worker of a job that trains already: its door, its generation, and its tuning."""

    door: JobStore
    generation: Generation
    tuning: str


def running_job(membership: Membership) -> Running | None:
    """Returns a worker of this job that trains already, or None if there is none."""
    addresses = _addresses(membership)
    # The first that answers will do; others may be paused.
    calls = [in_background(partial(_running, address)) for address in addresses]
    for call in as_completed(calls):
        if (found := call.result()) is not None:
            return found
    return None


def publish(membership: Membership, generation: Generation) -> None:
    """Says in the store of the launcher, if there is one, where the doors of the workers are."""
    doors = json.dumps([(one.host, one.port) for one in generation.contacts.values()])
    if membership.uses_existing_store:
        _of_launcher(membership, lambda store: store.set(_KEY, doors))


def open_door(membership: Membership, address: str) -> JobStore:
    """Returns a store that this worker serves at its address in the cluster.

    Args:
        membership: The place of this worker.
        address: Where it serves the store if the cluster does not say, or the port is taken.
    """
    if (own := _own_address(membership)) is not None:
        try:
            return serve_door(own.host, listening(own.host, own.port))
        except OSError as error:
            _log.info("Cannot listen at %s (%s): listening at %s.", own, error, address)
    return serve_door(address, listening(address, 0))


def _tasks(membership: Membership) -> list[Address | None]:
    """The addresses in the cluster, by rank, as far as they are known."""
    spec = membership.spec
    jobs = [job for job in ("chief", "worker") if job in spec.jobs]
    told = [address for job in jobs for address in spec.job_tasks(job)]
    found = [None if address is None else Address.parse(address) for address in told]
    if membership.uses_existing_store:
        # That of the launcher, whose store has no greeting.
        found[0] = None
    return found


def _own_address(membership: Membership) -> Address | None:
    tasks = _tasks(membership)
    return tasks[membership.rank] if tasks else None


def _addresses(membership: Membership) -> list[tuple[str, int]]:
    """All places where a worker of the job may be."""
    found = [(one.host, one.port) for one in _tasks(membership) if one is not None]
    if membership.uses_existing_store:
        told = _of_launcher(membership, lambda s: s.get(_KEY) if s.check([_KEY]) else b"[]")
        found += [(host, port) for host, port in json.loads(told or b"[]")]
    return found


def _of_launcher(membership: Membership, ask: Callable[[Store], _T]) -> _T | None:
    """Asks the store of the launcher, if it answers."""
    at = membership.coordinator_host, membership.coordinator_port
    try:
        return in_thread(lambda: ask(tcp_store(*at, _SECONDS)), _SECONDS)
    except STORE_ERRORS:
        return None


def _running(address: tuple[str, int]) -> Running | None:
    store = call_door(*address)
    if store is None:
        return None
    try:
        generation, tuning = store.look(["generation", "tuning"])
    except STORE_ERRORS:
        return None
    if generation is None:
        return None
    return Running(store, Generation.from_text(generation), (tuning or b"").decode())
