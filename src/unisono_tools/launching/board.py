"""Where the workers of an elastic job are: the launcher of each host knows it, and tells others."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

from unisono.cluster import Address
from unisono.cluster.elastic.doors import serve_door
from unisono.cluster.elastic.finding import (
    DOORS,
    JOINED,
    STARTED,
    addresses_in,
    doors_known_at,
    running_at,
)
from unisono.communicators import JobStore
from unisono.communicators.sockets import listening
from unisono.communicators.stores import in_background
from unisono.errors import ClusterError

# Workers that have just been started need some time to meet.
_START_SECONDS = 120.0
_PAUSE_SECONDS = 0.5


class Board:
    """A store in which the workers of this host say where the workers of their job are.

    It listens at the first of some addresses that belongs to this host and is free. If there is
    none, only this host can reach it.

    Args:
        endpoints: Where other launchers look for the job. The board has the next port.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, endpoints: Sequence[Address]) -> None:
        self._store = _served(endpoints)
        self.address = str(Address(self._store.host, self._store.port))

    def begin(self) -> None:
        """Says that the workers of this host have been started."""
        # In one operation: the workers may say where they are at the same time.
        self._store.set(STARTED, "")

    def have_joined(self, replacements: Iterable[str]) -> bool:
        """Whether one of these workers has joined the others."""
        found = self._store.look([f"{JOINED}/{one}" for one in replacements])
        return any(one is not None for one in found)

    def has_running_workers(self) -> bool:
        """Whether a worker of the job trains, as far as the board knows them."""
        doors = self._store.look([DOORS])[0] or b""
        return running_at(addresses_in(doors.decode())) is not None


def running_workers(endpoints: Sequence[Address]) -> str:
    """Returns where workers of a job are that runs already; "" if there is no such job.

    Args:
        endpoints: Where its launchers may be.

    Raises:
        ClusterError: If its workers have been started, and do not answer.
    """
    deadline = time.monotonic() + _START_SECONDS
    boards = [(one.host, one.port + 1) for one in endpoints]
    while True:
        asked = [in_background(partial(doors_known_at, at)) for at in boards]
        known = [found for one in asked if (found := one.result()) is not None]
        if not known:
            return ""
        doors = dict.fromkeys(",".join(filter(None, known)).split(","))
        if running_at(addresses_in(",".join(doors))) is not None:
            return ",".join(doors)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"An elastic job was started at {', '.join(map(str, endpoints))}, but none of its "
                f"workers answers ({', '.join(doors) or 'they have not met yet'}). Check their "
                "logs, and that UNISONO_JOB_TOKEN is the same on all hosts."
            )
        time.sleep(_PAUSE_SECONDS)


def _served(endpoints: Sequence[Address]) -> JobStore:
    for one in endpoints:
        try:
            return serve_door(one.host, listening(one.host, one.port + 1))
        except OSError:
            # It belongs to another host, or another launcher of this host has it.
            continue
    return serve_door("127.0.0.1", listening("127.0.0.1", 0))
