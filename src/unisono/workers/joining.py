"""Joining the other workers of a job."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from unisono.cluster import Address, Membership, WorkerCard, meet, open_store, was_left
from unisono.cluster.elastic import ElasticMembers
from unisono.cluster.elastic.doors import PURPOSE, Contact
from unisono.cluster.elastic.finding import open_door, running_job
from unisono.cluster.elastic.gathering import Attendee
from unisono.cluster.elastic.generation import Rules
from unisono.cluster.elastic.members import Connect
from unisono.communicators import (
    DEFAULT_TIMEOUT_SECONDS,
    Communicator,
    Countdown,
    IdentityCommunicator,
    JobStore,
    TracedCommunicator,
    connect,
    gpu_identity,
    slice_of,
    translated_store_errors,
)
from unisono.communicators.communicator import gather_texts
from unisono.communicators.hosts import address_towards, reachable
from unisono.costs import Tuning, current_tuning
from unisono.devices import Device, cpu_slots, default_devices, resolve, this_machine
from unisono.errors import ClusterError
from unisono.options import CommunicationOptions
from unisono.reductions import dealt
from unisono.sharing import LiveSet
from unisono.system import check_connections
from unisono.tracing import join_workers

if TYPE_CHECKING:
    from unisono.workers.elastic import ElasticJob


class Joined:
    """A store that this process serves or is connected to, and what it is in use for."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.users: WeakSet[Communicator | ElasticMembers] = WeakSet()


# One process may join a job several times: it keeps one store all the while. By the address of the
# store, and by how often the job was restarted.
_stores: dict[tuple[Address, int], Joined] = {}
_lock = threading.Lock()
# The elastic jobs of this process, the newest last.
jobs: LiveSet[ElasticJob] = LiveSet()
_log = logging.getLogger("unisono")
# What is left for the last step of joining, however long the first ones took.
_LEAST_SECONDS = 2.0


def join(
    membership: Membership,
    devices: Sequence[Device],
    options: CommunicationOptions,
    num_replicas: int | None = None,
) -> tuple[Communicator, tuple[int, ...], Tuning | None]:
    """Meets all workers of the job.

    Returns what connects them, how many replicas each has, and the constants of rank 0. All workers
    must cut gradients alike, so what one of them has measured counts for all.
    """
    _check_enough(num_replicas, membership.size)
    tuning = current_tuning() if membership.rank == 0 else None
    if membership.size == 1:
        return IdentityCommunicator(), (num_replicas or len(devices),), tuning
    check_connections()
    timeout = options.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
    left = Countdown(timeout, least=_LEAST_SECONDS)
    with translated_store_errors(), _joined(membership, timeout) as joined:
        text = None if tuning is None else tuning.to_text()
        card = WorkerCard.of(membership, len(devices), num_replicas, tuning=text)
        number = _next_meeting(joined.store, card, membership.coordinator_rank)
        own = PrefixStore(f"join/{number}", joined.store)
        cards = meet(PrefixStore("meet", own), card, left.seconds())
        tuning = Tuning.from_text(cards[0].tuning) if cards[0].tuning else None
        place = PrefixStore("connect", own), membership.rank, membership.size
        # All have just met, so who does not come now has ended since.
        communicator = _connector(devices, options, tuning)(*place, left.seconds(), number - 1)
    joined.users.add(communicator)
    _forget_others(joined)
    counts = tuple(one.num_devices for one in cards)
    return communicator, dealt(num_replicas, len(cards)) if num_replicas else counts, tuning


def join_elastic(
    membership: Membership,
    devices: Sequence[Device],
    options: CommunicationOptions,
    num_replicas: int,
    min_workers: int = 1,
) -> tuple[ElasticMembers, Tuning | None]:
    """Meets all workers of an elastic job, or joins those that train already.

    Returns the workers, and the constants of the first of them. In a job that trains already, `met`
    says that this worker has no state.
    """
    check_connections()
    timeout = options.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
    rules = Rules(min_workers, num_replicas, timeout)
    launch = membership.job
    # The first workers and those that join have the same key, however they were started.
    membership = replace(membership, job=PURPOSE, restart_count=0)
    card = WorkerCard.of(membership, len(devices), num_replicas)
    while (running := running_job(membership)) is not None:
        door = open_door(membership, address_towards((running.door.host, running.door.port)))
        tuning = Tuning.from_text(running.tuning) if running.tuning else None
        # It lies there before anybody can find this worker at work.
        door.set("tuning", running.tuning)
        me = Attendee(Contact.of(door, launch), card, door, rules)
        elastic = ElasticMembers(me, _connector(devices, options, tuning))
        if elastic.joined(running.generation):
            return elastic, tuning
        me.close()
    if membership.size < min_workers:
        raise ClusterError(
            f"An elastic job needs at least {min_workers} workers (`min_workers`), but the cluster "
            f"has {membership.size}. Start more workers, or lower `min_workers`."
        )
    communicator, _, tuning = join(membership, devices, options, num_replicas)
    door, is_first = _first_door(membership, communicator)
    door.set("tuning", tuning.to_text() if tuning else b"")
    contact = Contact.of(door, launch)
    # It finds what others leave for it from the moment that they know of it.
    me = Attendee(contact, card, door, rules, keeps_door=is_first)
    elastic = ElasticMembers(me, _connector(devices, options, tuning))
    texts = gather_texts(communicator, json.dumps(contact))
    elastic.found(communicator, [Contact(*json.loads(text)) for text in texts])
    for joined in _stores.values():
        if communicator in joined.users:
            # It ends when the workers meet again, and the job goes on.
            joined.users.remove(communicator)
            joined.users.add(elastic)
    _log.info("Other workers can join this job at %s.", Address(contact.host, contact.port))
    return elastic, tuning


def _first_door(membership: Membership, communicator: Communicator) -> tuple[JobStore, bool]:
    """Returns the store at which the others find this worker later, and whether it is the job's."""
    is_alone = membership.size == 1
    first = membership.coordinator
    at = None if is_alone else (first.host, first.port)
    addresses = gather_texts(communicator, address_towards(at))
    if not is_alone and membership.rank == membership.coordinator_rank:
        return _stores[membership.coordinator, membership.restart_count].store, True
    return open_door(membership, reachable(addresses[communicator.rank], addresses)), False


def _connector(
    devices: Sequence[Device], options: CommunicationOptions, tuning: Tuning | None
) -> Connect:
    """Returns what connects workers that have met; those of an elastic job each time."""
    places = map(this_machine().torch_device, devices)
    gpus = [place for place in places if place.type == "cuda"]

    def connected(store: Store, rank: int, size: int, seconds: float, number: int) -> Communicator:
        communicator = connect(
            store,
            rank,
            size,
            timeout_seconds=options.timeout_seconds or DEFAULT_TIMEOUT_SECONDS,
            implementation=options.implementation,
            joining_seconds=seconds,
            tuning=tuning,
            gpus=list(map(gpu_identity, gpus)),
            gpu=next(iter(gpus), None),
        )
        join_workers(rank, size)
        return TracedCommunicator(communicator, group=number + 1)

    return connected


def _check_enough(num_replicas: int | None, size: int) -> None:
    if num_replicas is not None and num_replicas < size:
        raise ClusterError(
            f"`num_replicas` is {num_replicas}, but there are {size} workers, and each needs a "
            f"replica. Start at most {num_replicas} workers, or ask for at least {size} replicas."
        )


def _next_meeting(store: Store, card: WorkerCard, coordinator: int) -> int:
    """Returns the number of the meeting in which this worker finds the others.

    Every attempt to join has a new number. A worker that is restarted after the others have given
    up waiting for it joins the attempt that the coordinator is making now.
    """
    joined = PrefixStore("joined", store)
    before = joined.add(str(card.rank), 0)
    number = max(before + 1, joined.add(str(coordinator), 0))
    while was_left(PrefixStore(f"join/{number}/meet", store)):
        number += 1
    joined.add(str(card.rank), number - before)
    return number


def leave(communicator: Communicator) -> None:
    """Closes what `join` has returned; its store stays for those who join the job again."""
    communicator.close()
    _use_no_more(communicator)


def _use_no_more(user: Communicator | ElasticMembers) -> None:
    for joined in list(_stores.values()):
        joined.users.discard(user)


def forget_elastic(job: ElasticJob) -> None:
    """When this process has left a job."""
    jobs.discard(job)
    _use_no_more(job.members)


def newest_workers() -> tuple[TracedCommunicator, JobStore] | None:
    """Returns what connects the workers that this process has joined last, and the job's store."""
    with _lock:
        for joined in reversed(_stores.values()):
            if users := [one for one in joined.users if isinstance(one, TracedCommunicator)]:
                return max(users, key=lambda one: one.group), joined.store
    return None


@contextmanager
def _joined(membership: Membership, timeout_seconds: float) -> Iterator[Joined]:
    """Gives the block the store of the job, which answers all it asks in `timeout_seconds`."""
    place = membership.coordinator, membership.restart_count
    deadline = time.monotonic() + timeout_seconds
    with _lock:
        if place not in _stores or not _answers(_stores[place].store, deadline):
            _stores[place] = Joined(open_store(membership, timeout_seconds))
        joined = _stores[place]
    joined.store.answer_by = deadline
    try:
        yield joined
    finally:
        joined.store.answer_by = None


def _answers(store: JobStore, deadline: float) -> bool:
    """Whether the process that serves a store is still there; if not, another may have come."""
    store.answer_by = deadline
    try:
        store.add("joined", 0)
    except DistError:
        return False
    return True


def _forget_others(current: Joined) -> None:
    """Ends stores that nobody uses: all workers have joined the current one instead."""
    with _lock:
        for place, joined in list(_stores.items()):
            if joined is not current and not joined.users:
                # Garbage that is not collected yet may hold it.
                _stores.pop(place).store.close()


def led_by(membership: Membership, rank: int) -> Membership:
    """Returns the same place in a job whose store is at the address of another worker."""
    if rank == membership.coordinator_rank or membership.size == 1:
        return membership
    chiefs = membership.spec.job_tasks("chief") if "chief" in membership.spec.jobs else []
    address = Address.parse([*chiefs, *membership.spec.job_tasks("worker")][rank])
    return replace(membership, coordinator_rank=rank, coordinator=address)


def local_devices(membership: Membership) -> tuple[Device, ...]:
    """Returns the devices of this worker: all GPUs, shared with the other workers of its host."""
    if membership.gpus is not None:
        return tuple(resolve(f"cuda:{index}") for index in membership.gpus) or cpu_slots(1)
    devices = default_devices()
    if membership.local_size == 1 or devices[0].type == "cpu":
        return devices
    share = devices[slice_of(membership.local_rank, membership.local_size, len(devices))]
    return share or (devices[membership.local_rank % len(devices)],)
