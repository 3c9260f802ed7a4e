"""Workers of an elastic job that leave it because they are preempted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from unisono.checkpoints.agreement import Notice

# What a worker says of itself with every run: it may be preempted, it may be time for it to leave,
# and it may have waited long enough for other workers that are preempted at about the same time.
UNDISTURBED, PREEMPTED, READY, READY_ALONE = range(4)


class Departures:
    """Which workers leave at the next step boundary. All workers know the same of it.

    Attributes:
        numbers: These workers, by number.
        ending: What tells this worker that it is preempted; None if nothing does.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.ending: Notice | None = None

    def sign(self) -> int:
        """Returns how this worker stands: one of the four numbers above."""
        return UNDISTURBED if self.ending is None else self.ending.sign()

    def note(self, signs: Sequence[int], members: Sequence[int]) -> None:
        """Takes in what all members have said with a run. Preempted ones leave together."""
        if READY_ALONE in signs or min(signs) >= READY:
            preempted = (number for number, sign in zip(members, signs, strict=True) if sign)
            self.numbers.update(preempted)

    def ranks(self, members: Sequence[int]) -> list[int]:
        """Returns the ranks of the members that leave."""
        return [rank for rank, number in enumerate(members) if number in self.numbers]

    def leave(self) -> NoReturn:
        """Leaves the program."""
        if self.ending is not None:
            self.ending.leave()
        sys.exit(0)
