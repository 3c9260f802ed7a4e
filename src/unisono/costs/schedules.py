"""The cost of a schedule of moves between the devices of one process.

A move starts when its devices are free, so moves between different devices overlap. Everything that
a root receives or sends goes through its one link. Values in the root's own memory are not copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from unisono.algorithms import Gather, Schedule
from unisono.costs.links import Line, Link

_FAR_BYTES = 1 << 40


def schedule_seconds(
    schedule: Schedule, memories: Sequence[Hashable], link: Link, memory: Link, num_bytes: float
) -> float:
    """Returns how long `schedule` takes for tensors of `num_bytes`."""
    free: dict[int, float] = {}
    for move in schedule:
        places = (move.root, *move.members)
        travelling = {memories[place] for place in move.members} - {memories[move.root]}
        seconds = link.seconds(len(travelling), len(travelling) * num_bytes)
        if isinstance(move, Gather):
            seconds += memory.seconds(1, (len(places) + 1) * num_bytes)
        else:
            # The sum writes these as it goes.
            beside_root = sum(memories[place] == memories[move.root] for place in move.members)
            seconds += beside_root * num_bytes / memory.bandwidth
        end = max(free.get(place, 0.0) for place in places) + seconds
        free.update(dict.fromkeys(places, end))
    return max(free.values(), default=0.0)


def schedule_line(
    schedule: Schedule, memories: Sequence[Hashable], link: Link, memory: Link
) -> Line:
    """Returns the line from empty tensors to very large ones."""
    latency = schedule_seconds(schedule, memories, link, memory, 0)
    far = schedule_seconds(schedule, memories, link, memory, _FAR_BYTES)
    return Line(latency, (far - latency) / _FAR_BYTES)
