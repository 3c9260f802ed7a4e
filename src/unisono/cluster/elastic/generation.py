"""Who trains together, and which of them may go on together when some are lost."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from unisono.cluster.elastic.doors import Contact

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
    """

    number: int
    contacts: Mapping[int, Contact]
    positions: Mapping[int, Position | None]
    next_number: int
    votes: Mapping[str, int]

    @staticmethod
    def from_text(text: str | bytes) -> Generation:
        """Reads what `to_text` has written."""
        number, workers, next_number, votes = json.loads(text)
        return Generation(
            number,
            {one: Contact(*contact) for one, contact, _ in workers},
            {one: None if place is None else tuple(place) for one, _, place in workers},
            next_number,
            votes,
        )

    def to_text(self) -> str:
        """Returns the generation as it lies in a store."""
        workers = [(one, tuple(self.contacts[one]), self.positions[one]) for one in self.contacts]
        return json.dumps([self.number, workers, self.next_number, self.votes])

    def number_of(self, process: str) -> int | None:
        """Returns what a worker is called, given the id of its process; None if it is not in."""
        return next((one for one, it in self.contacts.items() if it.process == process), None)

    def may_go_on(self, present: Collection[str], dead: Collection[str]) -> bool:
        """Returns whether these of its workers, by process, may go on without the others.

        Only one part of the workers may, wherever a network is cut. So it takes more than half, or
        half with the lowest number. Workers that are known to be dead cannot be such a part.
        """
        living = [one.process for one in self.contacts.values() if one.process not in dead]
        num_present = sum(one in present for one in living)
        if 2 * num_present == len(living):
            return bool(living) and living[0] in present
        return 2 * num_present > len(living)


class Standing(NamedTuple):
    """What a worker knows of the generations of its job.

    A generation counts when all its workers have accepted it. A worker that has accepted one and
    does not know whether all have may take part in a newer one only if that is right after both.

    Attributes:
        last: The last generation that counted.
        accepted: Later ones that may count.
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

    def to_texts(self) -> list[str]:
        """Returns it for a message."""
        return [one.to_text() for one in self.generations]

    @staticmethod
    def from_texts(texts: Sequence[str]) -> Standing:
        """Reads what `to_texts` has written."""
        last, *accepted = map(Generation.from_text, texts)
        return Standing(last, tuple(accepted))

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
