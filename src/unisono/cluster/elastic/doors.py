"""Where the workers of an elastic job find each other: every one serves a small store, its door.

In the store of a worker lie:

    generation     the last one that it was in
    room           how many more workers may join; tuning: the constants of the job
    knocks         how many have knocked; knock/NUMBER says who
    open           the token of the meeting that it holds now, if it holds one, and then
    TOKEN/votes    how many votes it was given; TOKEN/vote/NUMBER holds each
    TOKEN/proposal the next generation; TOKEN/accept/PROCESS says who has accepted it, and
                   TOKEN/rejected that somebody has not
    TOKEN/commit   that all have; or TOKEN/refusal: why there is none
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

from unisono.communicators import STORE_ERRORS, JobStore
from unisono.communicators.greeting import Greeted, call, job_key
from unisono.communicators.job_store import serve_store, store_at
from unisono.communicators.sockets import encryption
from unisono.communicators.stores import in_background
from unisono.system import boot_id, namespace, process_start, sees_own_processes

# What jobs that meet by accident are kept apart by is the token, and what workers say when they
# knock: a cluster spec, as for other jobs, may differ between workers that come and go.
PURPOSE = "elastic"
# How long a door may take to answer, how long one look waits for it to open, and how long a door
# at which nobody answers is left alone.
_ANSWER_SECONDS = 3.0
_PATIENCE_SECONDS = 0.2
_PAUSE_SECONDS = 0.5


class Contact(NamedTuple):
    """Where a worker can be reached, and how to know that it has ended.

    Attributes:
        process: An id that no other process has.
        machine: The same text for processes that see each other; "" if they cannot.
        launch: The same text for workers that were started together, and wait for each other where
            they begin a job.
    """

    host: str
    port: int
    process: str
    machine: str
    process_id: int
    started: str
    launch: str = ""

    @staticmethod
    def of(door: JobStore, launch: str = "") -> Contact:
        """Returns how this process can be reached that serves a door."""
        process, own = uuid.uuid4().hex, os.getpid()
        started = process_start(own) or ""
        return Contact(door.host, door.port, process, machine_identity(), own, started, launch)

    def has_ended(self) -> bool:
        """Returns whether the process is known to have ended. Silence does not count."""
        if not self.machine or self.machine != machine_identity():
            return False
        return process_start(self.process_id) != self.started


def machine_identity() -> str:
    """Returns a text that two processes share if each sees that the other ends, and hears it.

    Processes in two networks can be cut off from each other, though one kernel runs both. Where the
    text does not tell machines apart, or /proc shows other processes than those of this container,
    it is "".
    """
    known = boot_id(), namespace("pid"), namespace("net")
    return " ".join(map(str, known)) if all(known) and sees_own_processes() else ""


def serve_door(host: str, listener: socket.socket) -> JobStore:
    """Returns a store that this process serves for the others."""
    return serve_store(host, listener, job_secret(), encryption())


def job_secret() -> bytes:
    """Returns what only workers of the job know, if it has a token."""
    return job_key(f"unisono/{PURPOSE}/0")


def call_door(host: str, port: int, seconds: float = _ANSWER_SECONDS) -> JobStore | None:
    """Returns a connection to a door, or None if nobody answers there who is of the job."""
    try:
        greeted = _called(host, port, seconds)
    except OSError:
        return None
    return store_at((host, port), greeted)


def may_answer(host: str, port: int, *, is_here: bool = False) -> bool:
    """Whether somebody listens at an address who may be of the job, and just be slow.

    Args:
        is_here: Whether the address belongs to this host. There, only a process that does not
            accept connections any more lets a call wait; elsewhere, also a host that is down does.
    """
    try:
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
    except OSError as error:
        return is_here and isinstance(error, TimeoutError)
    try:
        _called(host, port, _ANSWER_SECONDS).socket.close()
    except OSError as error:
        return isinstance(error, TimeoutError)
    return True


def _called(host: str, port: int, seconds: float) -> Greeted:
    return call((host, port), job_secret(), 0, encryption(), time.monotonic() + seconds)


class Doors:
    """Connections to the doors of other workers. One that does not answer is left alone a while."""

    def __init__(self) -> None:
        self._stores: dict[str, JobStore] = {}
        self._calls: dict[str, Future[JobStore | None]] = {}
        self._not_before: dict[str, float] = {}

    def look(
        self, contact: Contact, keys: Sequence[str]
    ) -> tuple[JobStore, list[bytes | None]] | None:
        """Returns what lies in the store of a worker, or None if it does not answer now."""
        if time.monotonic() < self._not_before.get(contact.process, 0.0):
            return None
        store = self._stores.get(contact.process) or self._called(contact)
        if store is None:
            return None
        store.answer_by = time.monotonic() + _ANSWER_SECONDS
        try:
            found = store.look(keys)
        except STORE_ERRORS:
            self._stores.pop(contact.process, None)
            self._leave_alone(contact)
            return None
        self._stores[contact.process] = store
        return store, found

    def _called(self, contact: Contact) -> JobStore | None:
        """Calls in a thread: a worker that is paused or cut off must not keep this one waiting."""
        call = self._calls.get(contact.process)
        if call is None:
            call = self._calls[contact.process] = in_background(
                lambda: call_door(contact.host, contact.port)
            )
        wait([call], _PATIENCE_SECONDS)
        if not call.done():
            return None
        del self._calls[contact.process]
        if (store := call.result()) is None:
            self._leave_alone(contact)
        return store

    def _leave_alone(self, contact: Contact) -> None:
        self._not_before[contact.process] = time.monotonic() + _PAUSE_SECONDS

    def close(self) -> None:
        """Ends the connections that nobody else uses."""
        self._stores.clear()
