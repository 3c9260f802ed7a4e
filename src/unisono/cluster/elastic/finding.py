"""Where the doors of an elastic job are, for a worker that does not know whether the job runs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import as_completed, wait
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from unisono.cluster.elastic.doors import call_door, may_answer, serve_door
from unisono.cluster.elastic.generation import Generation
from unisono.cluster.membership import Membership
from unisono.cluster.spec import Address
from unisono.communicators import STORE_ERRORS, Countdown, JobStore
from unisono.communicators.hosts import is_loopback
from unisono.communicators.sockets import listening
from unisono.communicators.stores import in_background
from unisono.errors import CommunicationError

# The address at which the launcher of this host keeps a store for the addresses of all workers.
LAUNCHER = "UNISONO_LAUNCHER"
# Addresses of workers of a job that runs already. A worker that has them joins this job.
JOIN = "UNISONO_JOIN"
# The number of a worker that a launcher has started in the place of a lost one.
REPLACEMENT = "UNISONO_REPLACEMENT"
# In the store of a launcher: that workers have been started, where they are, which replacements
# have joined them, and for each process of this host the generation that it was in last.
STARTED, DOORS, JOINED, LAST = "started", "doors", "joined", "last"
_JOIN_SECONDS = 30.0
# How long a worker or a launcher may take to answer before it counts as not there. A worker that
# takes a busy job for none would wait for one that nobody starts.
_ANSWER_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
_TELL_SECONDS = 5.0
# The generation of which launchers are to know, though threads may still tell of an earlier one.
_newest: list[Generation] = []
_lock = threading.Lock()
_log = logging.getLogger("unisono")


class Running(NamedTuple):
    """A worker of a job that trains already: its door, its generation, and its tuning."""

    door: JobStore
    generation: Generation
    tuning: str


def running_job(membership: Membership) -> Running | None:
    """Returns a worker of this job that trains already, or None if there is none.

    Raises:
        CommunicationError: If this worker is to join a job, and no worker of it answers.
    """
    told, left = addresses_in(os.environ.get(JOIN, "")), Countdown(_JOIN_SECONDS)
    known = [(one.host, one.port) for one in _tasks(membership) if one is not None]
    while True:
        found = running_at([*known, *_doors_of_launcher(), *told])
        if found is not None or not told:
            return found
        if left.is_over():
            raise CommunicationError(
                f"{JOIN} says that this worker joins an elastic job with workers at "
                f"{os.environ[JOIN]}, but none of them answers. If the job still runs, give the "
                f"address of another worker, and check UNISONO_JOB_TOKEN. If not, unset {JOIN}."
            )
        time.sleep(_PAUSE_SECONDS)


def running_at(addresses: Iterable[tuple[str, int]]) -> Running | None:
    """Returns a worker that trains, of those with their doors at some addresses."""
    # The first that answers will do; others may be paused.
    calls = [in_background(partial(_running, address)) for address in dict.fromkeys(addresses)]
    for call in as_completed(calls):
        if (found := call.result()) is not None:
            return found
    return None


def addresses_in(text: str) -> list[tuple[str, int]]:
    """Reads addresses with commas between them."""
    parsed = [Address.parse(one.strip()) for one in text.split(",") if one.strip()]
    return [(one.host, one.port) for one in parsed]


def publish(generation: Generation, process: str) -> None:
    """Tells the launcher of this host, if it wants to know, where the doors of all workers are.

    So the launcher knows it before a worker can leave. One that is paused learns it later.

    Args:
        generation: The generation that counts now.
        process: The id of this process.
    """
    doors = [str(Address(one.host, one.port)) for one in generation.contacts.values()]
    with _lock:
        _newest[:] = [generation]

    def tell(at: tuple[str, int]) -> None:
        while (store := call_door(*at)) is None:
            if not may_answer(*at):
                return
        with _lock:
            if _newest[0] is generation:
                store.set(DOORS, ",".join(doors))
                store.set(f"{JOINED}/{os.environ.get(REPLACEMENT, '')}", "")
                store.set(f"{LAST}/{process}", str(generation.number))

    launchers = addresses_in(os.environ.get(LAUNCHER, ""))
    wait([in_background(partial(tell, at)) for at in launchers], _TELL_SECONDS)


def ended_in(generation: Generation) -> list[str]:
    """Returns the processes that have ended in a generation, as far as the launcher knows.

    Some may have gone on in a later one before they ended. The launcher knows that, too.
    """
    keys = [f"{LAST}/{one.process}" for one in generation.contacts.values() if one.has_ended()]
    number, found = str(generation.number).encode(), dict[str, bytes | None]()
    for at in addresses_in(os.environ.get(LAUNCHER, "")) if keys else ():
        with suppress(*STORE_ERRORS):
            if (store := call_door(*at, _ANSWER_SECONDS)) is not None:
                found |= zip(keys, store.look(keys), strict=True)
    return [key.partition("/")[2] for key, last in found.items() if last == number]


def doors_known_at(address: tuple[str, int]) -> str | None:
    """Returns the addresses of workers that a launcher knows of, as far as it answers.

    None if there is no launcher, or it has started no workers.
    """
    try:
        if (store := call_door(*address, _ANSWER_SECONDS)) is not None:
            doors, started = store.look([DOORS, STARTED])
            return None if doors is started is None else (doors or b"").decode()
    except STORE_ERRORS:
        pass
    return "" if may_answer(*address) else None


def _doors_of_launcher() -> list[tuple[str, int]]:
    launchers = addresses_in(os.environ.get(LAUNCHER, ""))
    return [door for one in launchers for door in addresses_in(doors_known_at(one) or "")]


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
    # The launcher listens at the address by which other hosts know this one, if it has one.
    for host, _ in addresses_in(os.environ.get(LAUNCHER, "")):
        if not is_loopback(host):
            address = host
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


def _running(address: tuple[str, int]) -> Running | None:
    store = call_door(*address, _ANSWER_SECONDS)
    if store is None:
        return None
    try:
        generation, tuning = store.look(["generation", "tuning"])
    except STORE_ERRORS:
        return None
    if generation is None:
        return None
    return Running(store, Generation.from_text(generation), (tuning or b"").decode())
