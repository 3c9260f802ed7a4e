"""Workers that leave an elastic job, and what the log says of those that come and go."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NoReturn

from unisono.cluster.elastic import Met
from unisono.reductions import ReplicaLayout

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


def account(
    before: ReplicaLayout,
    numbers: Sequence[int],
    now: ReplicaLayout,
    met: Met,
    leaving: Collection[int],
) -> str:
    """Says who was lost, has left or has joined, and who has taken over what.

    Args:
        numbers: Those of the workers that there were before.
        leaving: The numbers of workers that have said that they leave.
    """
    gone = [number for number in numbers if number not in met.members]
    left = [number for number in gone if number in leaving]
    lost = [number for number in gone if number not in leaving]
    new = [number for number in met.members if number not in numbers]
    had = dict(zip(numbers, before.ranges, strict=True))
    orphans = [replica for number in gone for replica in had[number]]
    taken = [
        f"worker {number} takes over replica{_listed(own)}"
        for number, own_range in zip(met.members, now.ranges, strict=True)
        if (own := [replica for replica in orphans if replica in own_range])
    ]
    who = [f"Lost worker{_listed(lost)}"] if lost else []
    who += [f"Worker{_listed(left)} left"] if left else []
    said = [f"{'. '.join(who)}: {'; '.join(taken)}."] if who else []
    said += [f"Worker{_listed(new)} joined the job."] if new else []
    return " ".join(said) or "The workers have met again."


def _listed(numbers: Sequence[int]) -> str:
    return f"{'s'[: len(numbers) - 1]} {', '.join(map(str, numbers))}"
