"""How a worker is let into an elastic job that runs: it knocks, and comes to the next meeting."""

from __future__ import annotations

import json
import math
import time

from unisono.cluster.elastic.gathering import Agreed, Attendee, Gathering
from unisono.cluster.elastic.generation import Generation
from unisono.communicators import STORE_ERRORS, Countdown, JobStore
from unisono.errors import WorkerTimeoutError

_PAUSE_SECONDS = 0.02
# The workers may have met meanwhile without letting anybody in.
_AGAIN_SECONDS = 2.0


def let_in(me: Attendee, running: Generation) -> tuple[Agreed | None, tuple[int, ...]]:
    """Knocks until the workers of a job let this one in.

    Args:
        me: The worker that knocks.
        running: The workers of the job, as far as is known.

    Returns:
        What they have agreed on, or None if the job has ended, and who its workers were before.
    """
    known: Generation | None = running
    left, knocked = Countdown(me.rules.timeout_seconds), dict[tuple[str, int], float]()
    while known is not None:
        newest, agreed = _visited(me, known, knocked)
        if agreed is not None:
            return agreed, tuple(known.contacts)
        if left.is_over():
            raise WorkerTimeoutError(
                f"This worker has asked for {me.rules.timeout_seconds:g} s to join an elastic job "
                f"of {len(known.contacts)} workers, which did not let it in. They let workers in "
                f"between two steps, at most {me.rules.max_workers} in all, one per replica. Check "
                "that their program lets workers in, or raise `timeout_seconds`."
            )
        known = newest
        time.sleep(_PAUSE_SECONDS)
    return None, ()


def _visited(
    me: Attendee, known: Generation, knocked: dict[tuple[str, int], float]
) -> tuple[Generation | None, Agreed | None]:
    """Goes to the lowest worker that answers: comes to its meeting, or knocks.

    Returns the newest generation, None if no worker is in one any more, and what came of a meeting.
    """
    is_alive = False
    for contact in known.contacts.values():
        if contact.has_ended():
            continue
        is_alive = True
        found = me.doors.look(contact, ["open", "generation", "room"])
        if found is None or found[1][1] is None:
            continue
        store, (token, text, room) = found
        newest = Generation.from_text(text or b"")
        if newest.number > known.number:
            return newest, None
        if token is not None:
            return known, Gathering(me, None, known=known).attend(store, token.decode())
        last = knocked.get((contact.process, known.number), -math.inf)
        if int(room or 0) > 0 and time.monotonic() - last > _AGAIN_SECONDS:
            knocked[contact.process, known.number] = time.monotonic()
            _knock(me, store)
        return known, None
    return known if is_alive else None, None


def _knock(me: Attendee, store: JobStore) -> None:
    try:
        number = store.add("knocks", 1)
        store.set(f"knock/{number}", json.dumps(me.contact))
    except STORE_ERRORS:
        # It has ended since it answered; the next one is asked.
        pass
