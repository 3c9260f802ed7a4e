"""What the log says when the workers of an elastic job have met again."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from unisono.cluster.elastic import Met
from unisono.reductions import ReplicaLayout


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
