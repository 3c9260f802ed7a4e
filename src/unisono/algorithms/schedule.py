"""Who sends what to whom: an algorithm as data.

A schedule speaks of *places*. Places 0 to P - 1 are the replicas' devices; further places are
devices that hold no value yet, such as a separate destination.

    Gather(root, members)   the root receives all that the members hold, to combine it
    Spread(root, members)   the root's result is copied to the members
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Gather(NamedTuple):
    """Sends the values of some devices to another one, which sums them.

    Attributes:
        root: The number of the device that receives.
        members: The numbers of those that send.
    """

    root: int
    members: tuple[int, ...]


class Spread(NamedTuple):
    """Sends a result from one device to others.

    Attributes:
        root: The number of the device that sends.
        members: The numbers of those that receive.
    """

    root: int
    members: tuple[int, ...]


Move: TypeAlias = Gather | Spread
Schedule: TypeAlias = tuple[Move, ...]


def num_transfers(schedule: Schedule) -> int:
    """Returns how many tensors a `schedule` moves, when partial sums are combined on the way."""
    return sum(len(move.members) for move in schedule)


def num_steps(schedule: Schedule) -> int:
    """Returns how many moves must follow each other. Other moves overlap."""
    ready: dict[int, int] = {}
    for move in schedule:
        places = (move.root, *move.members)
        step = max(ready.get(place, 0) for place in places) + 1
        ready.update(dict.fromkeys(places, step))
    return max(ready.values(), default=0)


def without(places: Sequence[int], place: int) -> tuple[int, ...]:
    """Returns `places` without `place`, in the same order."""
    return tuple(other for other in places if other != place)


def one_device(num_replicas: int, *, root: int = 0, destinations: Sequence[int]) -> Schedule:
    """Gathers the replicas' values on `root` and spreads the result to `destinations`.

    transfers   (P - 1) in, (D - 1) out, all of them through the root
    steps       2
    """
    return (
        Gather(root, without(range(num_replicas), root)),
        Spread(root, without(destinations, root)),
    )


def two_level(groups: Sequence[Sequence[int]], *, turn: int = 0) -> Schedule:
    """All-reduces over `groups`; with each `turn` the roots move on to the next device.

    group 0       group 1
    0 1 2 3       4 5 6 7
     \\|/           \\|/          members to the root of their group
      0 <---------- 4           roots to the first root, which has the result
      0 ----------> 4           the result to the other roots
     /|\\           /|\\          roots to the members of their group

    transfers   2 (P - 1), of which 2 (G - 1) between groups
    steps       4
    """
    order = sorted(place for group in groups for place in group)
    first = order[turn % len(order)]
    roots = [first if first in group else group[turn % len(group)] for group in groups]
    other_roots = without(roots, first)
    inside = [(root, without(group, root)) for root, group in zip(roots, groups, strict=True)]
    return (
        *(Gather(root, members) for root, members in inside if members),
        *((Gather(first, other_roots), Spread(first, other_roots)) if other_roots else ()),
        *(Spread(root, members) for root, members in inside if members),
    )
