"""The workers of an elastic job, from the view of one of them: it is let in, meets, and leaves."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.cluster.elastic.doors import Contact
from unisono.cluster.elastic.finding import publish
from unisono.cluster.elastic.gathering import Agreed, Attendee, Gathering
from unisono.cluster.elastic.generation import Generation, Position
from unisono.communicators import STORE_ERRORS, Communicator, Countdown, translated_store_errors
from unisono.errors import CommunicationError, WorkerLostError, WorkerTimeoutError

# Connects a rank of so many through a store, in so many seconds, given the generation's number.
Connect: TypeAlias = Callable[[Store, int, int, float, int], Communicator]
# What workers that have just agreed need to connect, at most.
_CONNECT_SECONDS = 30.0
# Workers may be lost again while they connect, but this must end.
_MAX_ATTEMPTS = 10
# Between two visits of a worker that wants to be let in, and between two knocks: the workers may
# have met meanwhile without letting anybody in.
_PAUSE_SECONDS = 0.02
_AGAIN_SECONDS = 2.0
_log = logging.getLogger("unisono")


@dataclass(frozen=True)
class Met:
    """What the workers have agreed on when they met: the same on all of them, but for their rank.

    Attributes:
        generation: Higher after each meeting; 0 at first.
        members: The workers, by the numbers that they keep, in the order of their ranks.
        communicator: What connects them until they meet again.
        positions: How far each had come, by rank; None for those that have no state.
        lost: Workers that were here before.
        joined: Workers that were not.
    """

    generation: int
    members: tuple[int, ...]
    rank: int
    communicator: Communicator
    positions: tuple[Position | None, ...]
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def position(self) -> Position:
        """How far those had come who had come farthest."""
        return max(one for one in self.positions if one is not None)

    @property
    def source(self) -> int:
        """The lowest of their ranks."""
        return self.positions.index(self.position)

    @property
    def stateless(self) -> tuple[int, ...]:
        """The ranks that have no state. While there are any, all ranks call `share_state`."""
        return tuple(rank for rank, one in enumerate(self.positions) if one is None)


class ElasticMembers:
    """The workers of an elastic job, begun by `found`, or by `joined` if it runs already."""

    # What came of the last meeting.
    met: Met

    def __init__(self, me: Attendee, connect: Connect) -> None:
        self._me = me
        self._connect = connect
        self._has_left = False

    def found(self, communicator: Communicator, contacts: Sequence[Contact]) -> None:
        """Begins with the first workers of a job, by rank, which have met and are connected."""
        numbered = dict(enumerate(contacts))
        positions: dict[int, Position | None] = dict.fromkeys(numbered, ())
        generation = Generation(0, numbered, positions, len(contacts), {}, contacts[0].process)
        self._begin(generation)
        self.met = _met(generation, communicator, before=numbered, seconds=0.0)

    def joined(self, running: Generation) -> bool:
        """Knocks at a job that runs until its workers let this one in.

        Returns whether they did; if not, the job has ended meanwhile.
        """
        start = time.monotonic()
        agreed, before = _let_in(self._me, running)
        if agreed is not None:
            self.met = self._settled(agreed, None, before, start)
        return agreed is not None

    @property
    def min_workers(self) -> int:
        """With fewer, nobody goes on."""
        return self._me.rules.min_workers

    def newcomers(self) -> bool:
        """Returns whether somebody waits to be let in, as far as this worker knows.

        It takes no message. One worker that knows it has to tell the others, and then all of them
        meet again at the same step boundary.
        """
        return self._me.door.add("knocks", 0) > self._me.num_knocks

    def meet_again(
        self,
        position: Position | None,
        error: CommunicationError | None = None,
        leaving: Collection[int] = (),
        *,
        admits: bool = False,
    ) -> Met:
        """Meets all workers that are left.

        All members call it: when a collective has failed, or at the same step boundary because
        somebody wants to join or to leave. It closes the communicator so far.

        Args:
            position: How far this worker has come; None if it has no state.
            error: What the collective has raised, if one has.
            leaving: The ranks of members that leave now, and do not call this; on one that is to
                leave, its own.
            admits: Whether workers that want to join are let in; the same on all members.
        """
        start, before = time.monotonic(), self.met
        if error is not None:
            # Others that wait in a collective for this worker find out that it has gone to meet.
            before.communicator.close()
        ranks = () if error is None else error.ranks
        lost = [before.members[rank] for rank in ranks if rank != before.rank]
        gone = [before.members[rank] for rank in leaving]
        agreed = Gathering(self._me, position, lost, gone, admits=admits).hold()
        self.met = self._settled(agreed, position, before.members, start)
        before.communicator.close()
        self._me.doors.close()
        return self.met

    def leave(self) -> None:
        """Leaves for good. The others meet again without this worker; see `leaving`."""
        if self._has_left:
            return
        self._has_left = True
        self.met.communicator.close()
        self._me.door.delete_key("generation")
        self._me.close()

    def _begin(self, generation: Generation) -> None:
        me, before = self._me, self._me.standing
        # Workers elsewhere get no notice: what launchers know keeps them from going on, too. And it
        # keeps a worker in the place of this one from beginning a job that others go on with.
        must_tell = before is not None and (
            before.leaves_elsewhere(generation, me.contact.machine)
            or before.gets_others(generation, me.contact.launch)
        )
        me.begin(generation)
        publish(generation, me.contact.process, me.rules.timeout_seconds if must_tell else None)

    def _settled(
        self, agreed: Agreed, position: Position | None, before: Collection[int], start: float
    ) -> Met:
        """Connects those who have agreed; if some are lost meanwhile, the others meet again."""
        for _ in range(_MAX_ATTEMPTS):
            self._begin(agreed.generation)
            # It may be used as long as the communicator is.
            self._store = agreed.store
            try:
                communicator = self._connected(agreed)
            except (WorkerLostError, WorkerTimeoutError) as error:
                failure = error
            else:
                seconds = time.monotonic() - start
                met = _met(agreed.generation, communicator, before, seconds)
                _log.debug(
                    "Workers %s train from now on, after a meeting of %.2f s. Lost: %s. New: %s.",
                    *(met.members, seconds, met.lost, met.joined),
                )
                return met
            members = list(agreed.generation.contacts)
            lost = [members[rank] for rank in failure.ranks if rank < len(members)]
            agreed = Gathering(self._me, position, lost).hold()
        raise failure

    def _connected(self, agreed: Agreed) -> Communicator:
        contacts = list(agreed.generation.contacts.values())
        limit = min(self._me.rules.timeout_seconds, _CONNECT_SECONDS)

        def check() -> None:
            if ended := [rank for rank, one in enumerate(contacts) if one.has_ended()]:
                failure = WorkerLostError(
                    "Workers ended while all were connecting. Check their logs.", ended
                )
                failure.is_of_all = True
                raise failure

        store = agreed.store
        store.answer_by, store.before_asking = time.monotonic() + limit, check
        try:
            # The store is that of the lowest worker, which has rank 0 from now on.
            with translated_store_errors():
                return self._connect(
                    PrefixStore(f"{agreed.token}/connect", store),
                    contacts.index(self._me.contact),
                    len(contacts),
                    limit,
                    agreed.generation.number,
                )
        finally:
            store.answer_by = store.before_asking = None


def _met(
    generation: Generation, communicator: Communicator, before: Collection[int], seconds: float
) -> Met:
    members = tuple(generation.contacts)
    return Met(
        generation.number,
        members,
        communicator.rank,
        communicator,
        tuple(generation.positions.values()),
        tuple(one for one in sorted(before) if one not in members),
        tuple(one for one in members if one not in before),
        seconds,
    )


def _let_in(me: Attendee, running: Generation) -> tuple[Agreed | None, tuple[int, ...]]:
    """Knocks until the workers of a job let this one in.

    Returns what they have agreed on, or None if the job has ended, and who they were before.
    """
    known, left = running, Countdown(me.rules.timeout_seconds)
    knocked = dict[tuple[str, int], float]()
    while living := [one for one in known.contacts.values() if not one.has_ended()]:
        newest = known
        # The lowest one that answers holds a meeting, or hears the knock.
        for contact in living:
            found = me.doors.look(contact, ["open", "generation", "room"])
            if found is None or found[1][1] is None:
                continue
            store, (token, text, room) = found
            newest = Generation.from_text(text or b"")
            if newest.job != known.job:
                # Its worker has ended, and one of another job has its port.
                newest = known
                continue
            if newest.number > known.number:
                break
            newest = known
            if token is not None:
                agreed = Gathering(me, None, known=known).attend(store, token.decode())
                if agreed is not None:
                    return agreed, tuple(known.contacts)
                break
            place = contact.process, known.number
            is_due = time.monotonic() - knocked.get(place, -math.inf) > _AGAIN_SECONDS
            if int(room or 0) > 0 and is_due:
                knocked[place] = time.monotonic()
                # It may have ended since it answered; then the next one is asked.
                with suppress(*STORE_ERRORS):
                    number = store.add("knocks", 1)
                    store.set(f"knock/{number}", json.dumps(me.contact))
            break
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
