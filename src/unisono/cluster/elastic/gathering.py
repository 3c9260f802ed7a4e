"""How the workers of an elastic job meet again: they agree on who is left, and how far to go back.

Every worker opens its door for a meeting, and goes to the lowest worker whose door is open, or
holds the meeting itself if there is none. There it votes: it says what it knows and how far it has
come. When all have come that may still live, or the time is over, the worker that holds the meeting
proposes the next generation, which counts as soon as all workers in it have accepted it. If the
meeting fails, for example because the worker that holds it ends, they vote again elsewhere. What
they have accepted binds them.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from unisono.cluster.elastic.doors import Contact, Doors
from unisono.cluster.elastic.finding import ended_in
from unisono.cluster.elastic.generation import (
    Choice,
    Generation,
    Position,
    Rules,
    Standing,
    Vote,
    misfit,
)
from unisono.cluster.elastic.notices import Notices, leave_notice
from unisono.cluster.meeting import WorkerCard
from unisono.communicators import STORE_ERRORS, Countdown, JobStore
from unisono.errors import CommunicationError, JobMismatchError, WorkerLostError, WorkerTimeoutError

_FIRST_PAUSE_SECONDS = 0.005
_LAST_PAUSE_SECONDS = 0.1
# How long to wait for workers that others have named as lost and that may live all the same.
_GRACE_SECONDS = 5.0
# How long to wait for those who have knocked, and for a proposal to be accepted.
_KNOCK_SECONDS = 3.0
_ACCEPT_SECONDS = 20.0
# How long one that holds a meeting waits for the others to read why nobody goes on.
_READ_SECONDS = 10.0
# How long the door of a meeting may take to answer. It may be cut off, or its worker paused.
_SILENT_SECONDS = 10.0
_log = logging.getLogger("unisono")


@dataclass
class Attendee:
    """A worker that comes to meetings.

    Attributes:
        door: The store that it serves.
        standing: The generations that it knows of; None for a worker that wants to join.
        num_knocks: How often somebody had knocked at its door when it last met the others.
        keeps_door: Whether its door is the first store of the job, which others may still use.
        notices: Where others say that they have gone on without it.
    """

    contact: Contact
    card: WorkerCard
    door: JobStore
    rules: Rules
    standing: Standing | None = None
    doors: Doors = field(default_factory=Doors)
    num_votes: int = 0
    num_knocks: int = 0
    keeps_door: bool = False
    notices: Notices = field(init=False)

    def __post_init__(self) -> None:
        self.notices = Notices(self.contact)

    def accept(self, proposal: Generation) -> None:
        """Binds this worker to a generation that may count from now on."""
        if self.standing is not None:
            self.standing = Standing(self.standing.last, (*self.standing.accepted, proposal))

    def begin(self, generation: Generation) -> None:
        """Says that a generation counts."""
        self.standing = Standing(generation)
        self.num_knocks = self.door.add("knocks", 0)
        self.door.set("generation", generation.to_text())
        self.door.set("room", str(self.rules.max_workers - len(generation.contacts)))

    def close(self) -> None:
        """Leaves the job: others find nobody here."""
        self.doors.close()
        self.notices.close()
        if not self.keeps_door:
            self.door.close()


class Agreed(NamedTuple):
    """What a meeting has led to: a generation that counts, and a store in which it can connect."""

    generation: Generation
    store: JobStore
    token: str


class Gathering:
    """One worker's part in a meeting.

    Args:
        position: How far it has come; None if it has no state.
        lost: Workers that are probably lost, by number.
        gone: Workers that have left, and do not come.
        admits: Whether workers that want to join are let in.
        known: For a worker that wants to join, the generation that it knows of.
    """

    def __init__(
        self,
        me: Attendee,
        position: Position | None,
        lost: Collection[int] = (),
        gone: Collection[int] = (),
        *,
        admits: bool = False,
        known: Generation | None = None,
    ) -> None:
        self._me = me
        self._admits = admits
        self._position = position
        self._known = known
        self._lost = set(lost)
        self._gone = set(gone)
        self._start = time.monotonic()
        self._left = Countdown(me.rules.timeout_seconds)
        self._grace_seconds = min(_GRACE_SECONDS, me.rules.timeout_seconds)
        self._turn = 0

    def hold(self) -> Agreed:
        """Meets the others. Only workers that were in a generation hold meetings."""
        while True:
            found = self._lowest_open()
            agreed = self._host() if found is None else self.attend(*found)
            if agreed is not None:
                return agreed

    # Where to go.

    def _standing(self) -> Standing:
        assert self._me.standing is not None
        return self._me.standing

    def _number(self) -> int:
        numbers = {one.process: number for number, one in self._contacts().items()}
        return numbers[self._me.contact.process]

    def _contacts(self) -> Mapping[int, Contact]:
        # A worker that wants to join may be on the host of one that has ended, and know of that.
        return self._standing().contacts if self._known is None else self._known.contacts

    def _dead(self) -> list[str]:
        if self._known is not None:
            return ended_in(self._known)
        contacts = self._contacts().items()
        dead = [one.process for n, one in contacts if n in self._gone or one.has_ended()]
        # Those who have ended have left a notice first, if they had gone on without this worker.
        # So a worker that says that they have ended knows of it.
        if self._me.notices.newest() > self._standing().last.number:
            raise self._left_behind()
        return dead

    def _lowest_open(self) -> tuple[JobStore, str] | None:
        """Returns the door of the lowest worker that holds a meeting, and the token of it."""
        dead, own = self._dead(), self._number()
        for number, contact in self._contacts().items():
            if number >= own:
                return None
            found = None if contact.process in dead else self._look_at(contact)
            if found is not None:
                return found
        return None

    def _look_at(self, contact: Contact) -> tuple[JobStore, str] | None:
        found = self._me.doors.look(contact, ["open", "generation"])
        if found is None:
            return None
        store, (token, generation) = found
        if generation is not None and not self._is_of_the_job(Generation.from_text(generation)):
            return None
        return None if token is None else (store, token.decode())

    def _is_of_the_job(self, other: Generation) -> bool:
        """Raises if others have gone on without this worker. Another job may have their port."""
        last = self._standing().last
        if other.job != last.job:
            return False
        if other.number > last.number and other.number_of(self._me.contact.process) is None:
            raise self._left_behind()
        return True

    def _left_behind(self) -> WorkerLostError:
        waited = time.monotonic() - self._start
        return WorkerLostError(
            "The other workers have gone on without this one, which was worker "
            f"{self._number()} and did not answer them. It noticed {waited:.1f} s after it had "
            "lost them. Start it again: it then joins them as a new worker, if they still train."
        )

    def _look_around(self) -> None:
        """Looks at one of the other workers, another one each time."""
        others = [it for number, it in self._contacts().items() if number != self._number()]
        if others:
            self._turn += 1
            contact = others[self._turn % len(others)]
            if not contact.has_ended():
                self._look_at(contact)

    # At the door of another worker.

    def attend(self, store: JobStore, token: str) -> Agreed | None:
        """Votes, and returns what came of it; None if this meeting has failed."""
        try:
            return self._attend(store, token)
        except STORE_ERRORS:
            return None

    def _attend(self, store: JobStore, token: str) -> Agreed | None:
        store.answer_by = time.monotonic() + _SILENT_SECONDS
        number = store.add(f"{token}/votes", 1)
        store.set(f"{token}/vote/{number}", self._vote().to_text())
        keys = [f"{token}/{what}" for what in ("proposal", "commit", "refusal")]
        keys += [f"refused/{self._me.contact.process}", "open"]
        accepted: Generation | None = None
        for _ in self._pauses():
            store.answer_by = time.monotonic() + _SILENT_SECONDS
            proposal, commit, refusal, refused, opened = store.look(keys)
            if refusal is not None:
                store.add(f"{token}/read", 1)
                raise CommunicationError(refusal.decode())
            if refused is not None:
                raise JobMismatchError(refused.decode())
            if proposal is not None and accepted is None:
                accepted = self._accepted(Generation.from_text(proposal), store, token)
            if commit is not None:
                return None if accepted is None else Agreed(accepted, store, token)
            if opened != token.encode():
                return None
            if accepted is None and self._me.standing is not None:
                better = self._lowest_open()
                if better is None or better[0] is not store:
                    return None
            waited = time.monotonic() - self._start
            if waited > self._me.rules.timeout_seconds + _ACCEPT_SECONDS:
                raise WorkerTimeoutError(
                    f"This worker has waited {waited:.1f} s for the others of its elastic job to "
                    "meet. Check their logs, and the network between the hosts."
                )
        return None

    def _vote(self) -> Vote:
        me = self._me
        me.num_votes += 1
        return Vote(me.contact, me.num_votes, me.standing, self._position, self._dead(), me.card)

    def _accepted(self, proposal: Generation, store: JobStore, token: str) -> Generation | None:
        attempt = proposal.votes.get(self._me.contact.process)
        if attempt == self._me.num_votes:
            self._me.accept(proposal)
            store.set(f"{token}/accept/{self._me.contact.process}", "")
            return proposal
        if attempt is not None:
            # It stems from an earlier vote: this worker may have accepted something else since.
            store.set(f"{token}/rejected", "")
        return None

    def _pauses(self) -> Iterator[None]:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            yield
            time.sleep(pause)
            pause = min(1.5 * pause, _LAST_PAUSE_SECONDS)

    # At the own door.

    def _host(self) -> Agreed | None:
        token = secrets.token_hex(8)
        door = self._me.door
        # However late it is, the others need some time to come here.
        self._left = Countdown(max(self._left.seconds(), _GRACE_SECONDS))
        door.set("open", token)
        try:
            chosen = self._choice(token)
            if chosen is None:
                return None
            proposal = chosen.generation()
            self._me.accept(proposal)
            door.set(f"{token}/proposal", proposal.to_text())
            if not self._all_accept(token, proposal):
                return None
            for one in chosen.left_behind():
                leave_notice(one, proposal.number)
            door.set(f"{token}/commit", "")
            return Agreed(proposal, door, token)
        finally:
            door.delete_key("open")

    def _choice(self, token: str) -> Choice | None:
        """Waits for the others, and returns what follows from their votes.

        None if a meeting is held at a lower worker.
        """
        own = self._vote()
        for _ in self._pauses():
            if self._lowest_open() is not None:
                return None
            self._look_around()
            votes = [own, *self._votes(token)]
            chosen = Choice(self._me.rules, votes, self._dead(), admits=self._admits)
            if not self._left.is_over() and (self._may_still_come(chosen) or chosen.lacks()):
                continue
            if why := chosen.lacks():
                self._refuse(token, why, [vote.contact for vote in votes[1:]])
            return chosen
        return None

    def _votes(self, token: str) -> list[Vote]:
        door, me = self._me.door, self._me
        keys = [f"{token}/vote/{n + 1}" for n in range(door.add(f"{token}/votes", 0))]
        votes = {}
        for text in filter(None, door.look(keys)):
            vote = Vote.from_text(text)
            votes[vote.contact.process] = vote
            if vote.standing is None and (why := misfit(me.card, vote.card)):
                door.set(f"refused/{vote.contact.process}", why)
                del votes[vote.contact.process]
        return list(votes.values())

    def _may_still_come(self, chosen: Choice) -> bool:
        waited = time.monotonic() - self._start
        missing = chosen.missing()
        if missing - self._lost or (missing and waited < self._grace_seconds):
            return True
        return self._admits and waited < _KNOCK_SECONDS and self._somebody_comes(chosen)

    def _somebody_comes(self, chosen: Choice) -> bool:
        """Whether somebody has knocked at this door since the last meeting, lives, and is not here.

        One that has not said yet who it is counts, too.
        """
        door, first = self._me.door, self._me.num_knocks
        keys = [f"knock/{n + 1}" for n in range(first, door.add("knocks", 0))]
        found = door.look(keys)
        contacts = [Contact(*json.loads(text)) for text in found if text is not None]
        coming = {one.process for one in contacts if not one.has_ended()}
        return None in found or not coming <= chosen.processes()

    def _refuse(self, token: str, why: str, others: Collection[Contact]) -> None:
        """Tells all who have come that nobody goes on, and raises that here."""
        door, left = self._me.door, Countdown(_READ_SECONDS)
        door.set(f"{token}/refusal", why)
        while door.add(f"{token}/read", 0) < sum(not one.has_ended() for one in others):
            if left.is_over():
                break
            time.sleep(_FIRST_PAUSE_SECONDS)
        raise CommunicationError(why)

    def _all_accept(self, token: str, proposal: Generation) -> bool:
        left, others = Countdown(_ACCEPT_SECONDS), list(proposal.contacts.values())
        others.remove(self._me.contact)
        keys = [f"{token}/accept/{one.process}" for one in others]
        for _ in self._pauses():
            if self._me.door.check(keys):
                return True
            has_failed = left.is_over() or self._me.door.check([f"{token}/rejected"])
            if has_failed or any(one.has_ended() for one in others):
                return False
        return False
