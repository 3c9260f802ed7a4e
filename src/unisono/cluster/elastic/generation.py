"""Who trains together, what workers say when they meet, and which of them may go on together."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from unisono.cluster.elastic.doors import Contact
from unisono.cluster.meeting import WorkerCard, differences

# How far a worker has come. Positions are compared as tuples.
Position: TypeAlias = tuple[int, ...]


class Generation(NamedTuple):
    """Workers that train together, until one is lost or one joins.

    Attributes:
        number: Later generations of a job have higher numbers.
        contacts: Its workers, by the numbers that they have in the job, lowest first.
        positions: How far each had come when they met; None for those that have no state.
        next_number: What the next worker that joins is called; no number is used twice.
        votes: For each process, by its id, which of its votes has led to this generation.
        job: The same text in all generations of a job, and in no other job.
    """

    number: int
    contacts: Mapping[int, Contact]
    positions: Mapping[int, Position | None]
    next_number: int
    votes: Mapping[str, int]
    job: str = ""

    @staticmethod
    def of(content: Any) -> Generation:
        """Returns the generation of which JSON has made lists and dicts."""
        number, contacts, positions, *rest = content
        return Generation(
            number,
            {int(one): Contact(*contact) for one, contact in contacts.items()},
            {int(one): None if at is None else tuple(at) for one, at in positions.items()},
            *rest,
        )

    @staticmethod
    def from_text(text: str | bytes) -> Generation:
        """Reads what `to_text` has written."""
        return Generation.of(json.loads(text))

    def to_text(self) -> str:
        """Returns the generation as it lies in a store."""
        return json.dumps(self)

    def number_of(self, process: str) -> int | None:
        """Returns what a worker is called, given the id of its process; None if it is not in."""
        return next((one for one, it in self.contacts.items() if it.process == process), None)

    def may_go_on(self, present: Collection[str], dead: Collection[str]) -> bool:
        """Returns whether these of its workers, by process, may go on without the others.

        Only one part of the workers may, wherever a network is cut. So it takes more than half, or
        half with the lowest number. Workers that are known to be dead count, too, while others are
        silent: they may have gone on with these before they died. Those that are present and leave
        count as dead, too, and do not go on by themselves: the others may have, without them.
        """
        members = [one.process for one in self.contacts.values()]
        here = {one for one in members if one in present}
        num_present = len(here)
        if all(one in dead for one in members if one not in here):
            return num_present > 0
        if here <= set(dead):
            return False
        if 2 * num_present == len(members):
            return members[0] in present
        return 2 * num_present > len(members)


class Standing(NamedTuple):
    """What a worker knows of the generations of its job.

    A generation counts when all its workers have accepted it. A worker that has accepted one and
    does not know whether all have may take part in a newer one only if that is right after both.

    Attributes:
        accepted: Generations after the last one, which may count.
    """

    last: Generation
    accepted: tuple[Generation, ...] = ()

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All of them."""
        return (self.last, *self.accepted)

    @property
    def contacts(self) -> dict[int, Contact]:
        """All their workers, lowest number first."""
        return dict(sorted(pair for one in self.generations for pair in one.contacts.items()))

    def leaves_elsewhere(self, generation: Generation, machine: str) -> bool:
        """Whether a generation goes on without workers on other machines, which may live."""
        present = {one.process for one in generation.contacts.values()}
        absent = [one for one in self.contacts.values() if one.process not in present]
        return any(one.machine != machine for one in absent)

    def gets_others(self, generation: Generation, launch: str) -> bool:
        """Whether a generation has workers that other launchers have started, as none before."""
        before, now = (
            any(contact.launch != launch for contact in one.contacts.values())
            for one in (self.last, generation)
        )
        return now and not before

    def together_with(self, others: Sequence[Standing]) -> Standing:
        """Returns what several workers know together."""
        all_of_them = [self, *others]
        last = max((one.last for one in all_of_them), key=lambda one: one.number)
        later = {
            (one.number, tuple(one.contacts.values())): one
            for standing in all_of_them
            for one in standing.accepted
            # If it had counted, the last one would come after it.
            if one.number > last.number
        }
        return Standing(last, tuple(later.values()))


@dataclass(frozen=True)
class Rules:
    """The limits of an elastic job, the same on all workers.

    Attributes:
        min_workers: With fewer, nobody goes on.
        max_workers: No more are let in.
        timeout_seconds: How long to wait for workers that may still come.
    """

    min_workers: int
    max_workers: int
    timeout_seconds: float


class Vote(NamedTuple):
    """What a worker says.

    Attributes:
        attempt: Which of its votes this is.
        standing: None for a worker that wants to join.
        position: How far it has come; None if it has no state.
        dead: Processes of workers that it knows to be dead, or to have left.
    """

    contact: Contact
    attempt: int
    standing: Standing | None
    position: Position | None
    dead: list[str]
    card: WorkerCard

    def to_text(self) -> str:
        """Returns the vote as it lies in a store."""
        return json.dumps(self, default=asdict)

    @staticmethod
    def from_text(text: bytes) -> Vote:
        """Reads what `to_text` has written."""
        contact, attempt, standing, position, dead, card = json.loads(text)
        if standing is not None:
            last, accepted = standing
            standing = Standing(Generation.of(last), tuple(map(Generation.of, accepted)))
        position = None if position is None else tuple(position)
        return Vote(Contact(*contact), attempt, standing, position, dead, WorkerCard(**card))


class Choice:
    """The next generation, as far as the workers that have come tell.

    Args:
        votes: The first one is of the worker that holds the meeting.
        admits: Whether workers that want to join are let in.
    """

    def __init__(
        self, rules: Rules, votes: Sequence[Vote], dead: Collection[str], *, admits: bool
    ) -> None:
        standings = [vote.standing for vote in votes if vote.standing is not None]
        self._rules = rules
        self._votes = votes
        self._standing = standings[0].together_with(standings[1:])
        self._dead = set(dead).union(*(vote.dead for vote in votes))
        self._contacts = self._standing.contacts
        # A worker that wants to join may have got several numbers, and keeps the lowest.
        numbers = {one.process: n for n, one in reversed(self._contacts.items())}
        members = {
            numbers[one.contact.process]: one for one in votes if one.contact.process in numbers
        }
        self._members = dict(sorted(members.items()))
        newcomers = [
            one
            for one in votes
            if one.contact.process not in numbers and not one.contact.has_ended()
        ]
        room = max(0, rules.max_workers - len(self._members)) if admits else 0
        first = max(one.next_number for one in self._standing.generations)
        self._newcomers = dict(enumerate(newcomers[:room], first))

    def processes(self) -> set[str]:
        """Returns who has come."""
        return {vote.contact.process for vote in self._votes}

    def missing(self) -> set[int]:
        """Returns who has not, and may live."""
        settled = self.processes() | self._dead
        return {number for number, one in self._contacts.items() if one.process not in settled}

    def lacks(self) -> str | None:
        """Returns why these workers may not go on, in words."""
        present, num_workers = self.processes(), len(self._members) + len(self._newcomers)
        here, missing = _words(self._members), _words(self.missing())
        told = f"Here: workers {here}. Silent: workers {missing}."
        if not all(one.may_go_on(present, self._dead) for one in self._standing.generations):
            return (
                f"An elastic job was cut in two. {told} The silent ones may train on elsewhere. To "
                f"go on, it takes more than half of the last {len(self._standing.last.contacts)} "
                "workers, or half with the lowest number. Check the network between the hosts. If "
                "no worker trains any more, start the job again from its last checkpoint."
            )
        if num_workers < self._rules.min_workers:
            return (
                f"An elastic job needs at least {self._rules.min_workers} workers "
                f"(`min_workers`), and the number left is {num_workers}. {told} Start more "
                "workers, or lower `min_workers`."
            )
        if all(vote.position is None for vote in self._members.values()):
            return (
                f"All workers that had the state of an elastic job are lost. {told} Start the job "
                "again from its last checkpoint."
            )
        return None

    def left_behind(self) -> list[Contact]:
        """Returns who has not come. Also one that is to leave may be paused before it does."""
        present = self.processes()
        return [one for one in self._contacts.values() if one.process not in present]

    def generation(self) -> Generation:
        """Returns the next generation."""
        generations = self._standing.generations
        workers = {**self._members, **self._newcomers}
        return Generation(
            1 + max(one.number for one in generations),
            {number: vote.contact for number, vote in workers.items()},
            {number: vote.position for number, vote in workers.items()},
            max(one.next_number for one in generations) + len(self._newcomers),
            {vote.contact.process: vote.attempt for vote in workers.values()},
            self._standing.last.job,
        )


def misfit(own: WorkerCard, other: WorkerCard) -> str | None:
    """Returns why a worker that wants to join does not belong to this job, if it does not."""
    sentences, _ = differences([own, replace(other, size=own.size)])
    if not sentences:
        return None
    return (
        f"A worker that wants to join a running job differs from it in {'; '.join(sentences)}. "
        "Start it with the same script, versions and `num_replicas`."
    )


def _words(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
