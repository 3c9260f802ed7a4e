"""All-reduce in two levels: inside groups of near devices, then between their roots.

group 0       group 1
0 1 2 3       4 5 6 7
 \\|/           \\|/          members to the root of their group
  0 <---------- 4           roots to the first root, which has the result
  0 ----------> 4           the result to the other roots
 /|\\           /|\\          roots to the members of their group

transfers   2 (P - 1), of which 2 (G - 1) between groups
steps       4
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.algorithms.schedule import Gather, Schedule, Spread, without


def two_level(groups: Sequence[Sequence[int]], *, turn: int = 0) -> Schedule:
    """All-reduces over `groups`; with each `turn` the roots move on to the next device."""
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
