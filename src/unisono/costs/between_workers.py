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
    Rounds,
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
from unisono.costs.rounds import Phase, line_of, seconds_of
from unisono.errors import UnsupportedError

# A guess where nothing was measured: a step costs as much as 64 KB.
USUAL_LINK = Link(latency=64e-6, bandwidth=1.024e9)
# Up to here every rank hears from all others in each collective, so an error names those at fault.
_FEW_RANKS = 8
# Sums are fast beside a link; their rate hardly changes what is best.
_SUM_RATE = 1e10
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


def rounds_of(algorithm: str, num_ranks: int) -> Rounds:
    """Returns a flat algorithm among so many ranks."""
    return _FLAT[algorithm](num_ranks)


def fastest_flat(num_ranks: int, num_bytes: int, link: Link) -> str:
    """Returns the algorithm that ranks run for a tensor of so many bytes.

    All ranks decide alike: the constants of the link are the same on all of them.
    """
    # The decision changes at few sizes; a power of two stands for all up to the next.
    return _fastest_flat(num_ranks, num_bytes.bit_length(), link)


@functools.lru_cache(maxsize=1024)
def _fastest_flat(num_ranks: int, num_bits: int, link: Link) -> str:
    cluster = Cluster(num_ranks, 1, link, link, _SUM_RATE)
    small = "one step" if num_ranks <= _FEW_RANKS else "doubling"
    seconds = {
        name: seconds_of(phases_of(name, num_ranks, 1), cluster, (1 << num_bits) - 1)
        for name in (small, "exchange")
    }
    return min(seconds, key=lambda name: seconds[name])


def first_bytes_for_parts(cluster: Cluster) -> int:
    """Returns the size from which on `parts` are faster than `leaders`; 0 if they always are."""
    shape = cluster.num_hosts, cluster.ranks_per_host
    leaders, parts = (line_of(phases_of(name, *shape), cluster) for name in ("leaders", "parts"))
    saved = leaders.per_byte - parts.per_byte
    lost = parts.latency - leaders.latency
    return max(0, round(lost / saved)) if saved > 0 else 1 << 62
