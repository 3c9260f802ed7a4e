"""Where the doors of an elastic job are, for a worker that does not know whether the job runs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import as_completed, wait
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
from unisono.errors import CommunicationError, WorkerTimeoutError

# The address at which the launcher of this host keeps a store for the addresses of all workers.
LAUNCHER = "UNISONO_LAUNCHER"
# Addresses of workers of a job that runs already. A worker that has them joins this job.
JOIN = "UNISONO_JOIN"
# The number of a worker that a launcher has started in the place of a lost one.
REPLACEMENT = "UNISONO_REPLACEMENT"
# In the store of a launcher: that workers have been started, where they are, which of them other
# launchers have started later, which replacements have joined them, and for each process of this
# host the generation that it was in last.
STARTED, DOORS, OTHERS, JOINED, LAST = "started", "doors", "others", "joined", "last"
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

    Raises if this worker is to join a job, or may not begin one, and no worker of it answers.
    """
    told, left = addresses_in(os.environ.get(JOIN, "")), Countdown(_JOIN_SECONDS)
    known = [(one.host, one.port) for one in _tasks(membership) if one is not None]
    while True:
        of_launcher, may_train = _doors_of_launcher()
        found = running_at([*known, *of_launcher, *told])
        if found is not None or not (told or may_train):
            return found
        if left.is_over():
            raise CommunicationError(
                f"{JOIN} says that this worker joins an elastic job with workers at "
                f"{os.environ[JOIN]}, but none of them answers. If the job still runs, give the "
                f"address of another worker, and check UNISONO_JOB_TOKEN. If not, unset {JOIN}."
                if told
                else "This worker was started in the place of another one. Other launchers have "
                "started workers of the same elastic job since it began, and none of them answers: "
                "they may train on, or have finished. So this worker does not begin the job again. "
                "Look at their logs. If they have been lost, start the job again."
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


def publish(generation: Generation, process: str, seconds: float | None = None) -> None:
    """Tells the launcher of this host, if it wants to know, where the doors of all workers are.

    So the launcher knows it before a worker can leave. One that is paused learns it later.

    Args:
        seconds: How long to wait for a launcher that must know it at once; None if it need not.
    """
    contacts = generation.contacts.values()
    doors = [str(Address(one.host, one.port)) for one in contacts]
    (launch,) = (one.launch for one in contacts if one.process == process)
    others = [door for door, one in zip(doors, contacts, strict=True) if one.launch != launch]
    with _lock:
        _newest[:] = [generation]

    def tell(at: tuple[str, int]) -> None:
        while (store := call_door(*at)) is None:
            if not may_answer(*at, is_here=True):
                return
        with _lock:
            if _newest[0] is generation:
                store.set(OTHERS, ",".join(others))
                store.set(DOORS, ",".join(doors))
                store.set(f"{JOINED}/{os.environ.get(REPLACEMENT, '')}", "")
                store.set(f"{LAST}/{process}", str(generation.number))

    telling = [in_background(partial(tell, at)) for at in _launchers()]
    if wait(telling, _TELL_SECONDS if seconds is None else seconds).not_done and seconds:
        raise WorkerTimeoutError(
            f"Workers on other hosts are silent or have joined, and this one goes on only if its "
            f"launcher knows of that. The launcher at {os.environ[LAUNCHER]} has not answered for "
            f"{seconds:g} s. Check whether it is paused, and start this worker again."
        )


def ended_in(generation: Generation) -> list[str]:
    """Returns the processes that have ended in a generation, as far as the launcher knows.

    Some may have gone on in a later one before they ended. The launcher knows that, too.
    """
    keys = [f"{LAST}/{one.process}" for one in generation.contacts.values() if one.has_ended()]
    number, found = str(generation.number).encode(), dict[str, bytes | None]()
    for at in _launchers() if keys else ():
        if (looked := _look(at, *keys)) is not None:
            found |= zip(keys, looked[1], strict=True)
    return [key.partition("/")[2] for key, last in found.items() if last == number]


def doors_known_at(address: tuple[str, int]) -> str | None:
    """Returns the addresses of workers that a launcher knows of, as far as it answers.

    None if there is no launcher, or it has started no workers.
    """
    if (looked := _look(address, DOORS, STARTED)) is None:
        return "" if may_answer(*address) else None
    _, (doors, started) = looked
    return None if doors is started is None else (doors or b"").decode()


def _doors_of_launcher() -> tuple[list[tuple[str, int]], bool]:
    """Returns the workers that the launcher of this host knows of.

    Also whether some of them may train, though all that it has started itself have ended: others
    were started later, and would not be waited for where the job begins again.
    """
    found, may_train = list[tuple[str, int]](), False
    for at in _launchers():
        if (looked := _look(at, DOORS, OTHERS)) is None:
            # One that is paused may know of others.
            may_train |= may_answer(*at, is_here=True)
            continue
        _, (doors, others) = looked
        found += addresses_in((doors or b"").decode())
        may_train |= bool(others)
    return found, may_train


def _launchers() -> list[tuple[str, int]]:
    """Returns the addresses by which other hosts and this one know the launcher of this host."""
    return addresses_in(os.environ.get(LAUNCHER, ""))


def _look(at: tuple[str, int], *keys: str) -> tuple[JobStore, list[bytes | None]] | None:
    """Returns a store and what lies in it, or None if nobody answers there who is of the job."""
    try:
        store = call_door(*at, _ANSWER_SECONDS)
        return None if store is None else (store, store.look(keys))
    except STORE_ERRORS:
        return None


def open_door(membership: Membership, address: str) -> JobStore:
    """Returns a store that this worker serves at its address in the cluster.

    Args:
        address: Where it serves the store if the cluster does not say, or the port is taken.
    """
    tasks = _tasks(membership)
    if tasks and (own := tasks[membership.rank]) is not None:
        try:
            return serve_door(own.host, listening(own.host, own.port))
        except OSError as error:
            _log.info("Cannot listen at %s (%s): listening at %s.", own, error, address)
    # The launcher listens at the address by which other hosts know this one, if it has one.
    for host, _ in _launchers():
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


def _running(address: tuple[str, int]) -> Running | None:
    if (looked := _look(address, "generation", "tuning")) is None:
        return None
    store, (generation, tuning) = looked
    if generation is None:
        return None
    return Running(store, Generation.from_text(generation), (tuning or b"").decode())
