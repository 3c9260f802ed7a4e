"""What the log says when the workers of an elastic job have met again."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.cluster.elastic import Met
from unisono.reductions import ReplicaLayout


def account(before: ReplicaLayout, numbers: Sequence[int], now: ReplicaLayout, met: Met) -> str:
    """Says who was lost or has joined, and who has taken over what.

    Args:
        before: Which replicas each worker had.
        numbers: The numbers of these workers.
        now: Which replicas each worker has.
        met: The workers that there are now.
    """
    lost = [number for number in numbers if number not in met.members]
    new = [number for number in met.members if number not in numbers]
    had = dict(zip(numbers, before.ranges, strict=True))
    orphans = [replica for number in lost for replica in had[number]]
    taken = [
        f"worker {number} takes over replica{_listed(own)}"
        for number, own_range in zip(met.members, now.ranges, strict=True)
        if (own := [replica for replica in orphans if replica in own_range])
    ]
    said = [f"Lost worker{_listed(lost)} of {len(numbers)}: {'; '.join(taken)}."] if lost else []
    said += [f"Worker{_listed(new)} joined the job."] if new else []
    return " ".join(said) or "The workers have met again."


def _listed(numbers: Sequence[int]) -> str:
    return f"{'s'[: len(numbers) - 1]} {', '.join(map(str, numbers))}"
