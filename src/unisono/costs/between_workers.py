"""The algorithms between workers, on hosts of several ranks.

Flat ones treat all ranks alike. Those that Unisono has for several hosts add up inside each host
first: `leaders`, where the first rank of a host carries all of it to the others, and `parts`, where
each rank of a host carries its part. The sum of a host is a whole branch of the tree of all terms
only if it has 2, 4, 8, ... ranks. Otherwise its first rank carries all `terms`, one by one.
"""

from __future__ import annotations

import functools
from fractions import Fraction

from unisono.algorithms import (
    all_gather,
    doubling,
    exchange,
    gather,
    halving,
    one_step,
    ring,
    spread,
    tree,
)
from unisono.costs.links import Cluster, Link
from unisono.costs.rounds import Phase, line_of
from unisono.errors import UnsupportedError

# Without constants: what one step may send more than two. Below, a step costs more than that.
STEP_BYTES = 64 << 10
_FLAT = {
    "one step": one_step,
    "exchange": exchange,
    "ring": ring,
    "doubling": doubling,
    "halving": halving,
    "tree": tree,
}
_BY_HOST = ("leaders", "parts", "terms")


@functools.lru_cache(maxsize=64)
def phases_of(algorithm: str, num_hosts: int, ranks_per_host: int) -> tuple[Phase, ...]:
    """Returns an algorithm as phases of rounds.

    Args:
        algorithm: Its name, such as "ring" or "parts".
        num_hosts: How many hosts there are.
        ranks_per_host: How many ranks each of them has.

    Raises:
        UnsupportedError: If there is no algorithm of that name.
    """
    if algorithm in _FLAT:
        return (Phase(_FLAT[algorithm](num_hosts * ranks_per_host)),)
    if algorithm not in _BY_HOST:
        known = ", ".join(map(repr, (*_FLAT, *_BY_HOST)))
        raise UnsupportedError(f"`algorithm` must be one of {known}, got {algorithm!r}.")
    inside, between = Phase(exchange(ranks_per_host)), exchange(num_hosts)
    back = Phase(spread(ranks_per_host))
    if algorithm == "leaders":
        return inside, Phase(between, stride=ranks_per_host), back
    if algorithm == "terms":
        all_terms = Fraction(ranks_per_host)
        carried = Phase(between, stride=ranks_per_host, share=all_terms)
        return Phase(gather(ranks_per_host)), carried, back
    part = Fraction(1, ranks_per_host)
    carried = Phase(between, stride=ranks_per_host, groups=ranks_per_host, share=part)
    return inside, carried, Phase(all_gather(ranks_per_host))


def algorithms_for(num_hosts: int, ranks_per_host: int) -> list[str]:
    """Returns the names of the algorithms that differ on such a cluster."""
    return [*_FLAT, *_by_host(num_hosts, ranks_per_host)]


def hierarchical_for(num_hosts: int, ranks_per_host: int) -> str:
    """Returns the name of what Unisono does with large tensors by host, and then between hosts."""
    return _by_host(num_hosts, ranks_per_host)[-1]


def _by_host(num_hosts: int, ranks_per_host: int) -> list[str]:
    if num_hosts == 1 or ranks_per_host == 1:
        return []
    is_branch = ranks_per_host & (ranks_per_host - 1) == 0
    return ["leaders", "parts"] if is_branch else ["terms"]


def one_step_pays(num_ranks: int, num_bytes: int, step_bytes: float) -> bool:
    """Whether to send all to everybody in one step rather than parts and sums in two.

    The one step sends (P - 1) (P - 2) / P of the tensor more. It pays as long as a step costs more
    than these bytes: `step_bytes` is the latency of a step times the bandwidth.
    """
    return num_bytes * (num_ranks - 1) * (num_ranks - 2) // num_ranks <= step_bytes


def step_bytes(link: Link) -> int:
    """Returns how many bytes a link carries in the time that a step takes."""
    return int(link.latency * link.bandwidth)


def first_bytes_for_parts(cluster: Cluster) -> int:
    """Returns the size from which on `parts` are faster than `leaders`; 0 if they always are."""
    shape = cluster.num_hosts, cluster.ranks_per_host
    leaders, parts = (line_of(phases_of(name, *shape), cluster) for name in ("leaders", "parts"))
    saved = leaders.per_byte - parts.per_byte
    lost = parts.latency - leaders.latency
    return max(0, round(lost / saved)) if saved > 0 else 1 << 62
