"""The algorithms between workers, on hosts of several ranks.

Flat algorithms treat all ranks alike. The others sum inside each host first. With `leaders`, the
first rank of a host sends everything to the other hosts; with `parts`, each rank of a host sends
its part. The sum of a host is a branch of the tree only if the host has 2, 4, 8, ... ranks.
Otherwise the first rank sends all `terms`, one by one.
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

# A guess, without a measurement: a step costs as much as 64 KB.
USUAL_LINK = Link(latency=64e-6, bandwidth=1.024e9)
# Up to here every rank receives from all others in each collective, so errors name the right ranks.
_FEW_RANKS = 8
# Up to here the first rank of a host sends everything, because another copy inside the host costs
# less than another step.
SMALL_BYTES = 64 << 10
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
# What ranks run for large tensors instead of an exchange. Two ranks swap everything: the same
# number of bytes, in one step.
_LARGE = {2: "one step"}


@functools.lru_cache(maxsize=64)
def phases_of(algorithm: str, num_hosts: int, ranks_per_host: int) -> tuple[Phase, ...]:
    """Returns an algorithm as phases of rounds.

    Args:
        algorithm: Its name, such as "ring" or "parts".
        num_hosts: The number of hosts.
        ranks_per_host: The number of ranks per host.

    Raises:
        UnsupportedError: If there is no algorithm of that name.
    """
    if algorithm in _FLAT:
        return (Phase(_FLAT[algorithm](num_hosts * ranks_per_host)),)
    if algorithm not in _BY_HOST:
        known = ", ".join(map(repr, (*_FLAT, *_BY_HOST)))
        raise UnsupportedError(f"`algorithm` must be one of {known}, got {algorithm!r}.")
    return _by_host_phases(
        algorithm, rounds_of(_LARGE.get(num_hosts, "exchange"), num_hosts), ranks_per_host
    )


def _by_host_phases(algorithm: str, between: Rounds, ranks_per_host: int) -> tuple[Phase, ...]:
    inside, back = Phase(exchange(ranks_per_host)), Phase(spread(ranks_per_host))
    if algorithm == "leaders":
        return inside, Phase(between, stride=ranks_per_host), back
    if algorithm == "terms":
        all_terms = Fraction(ranks_per_host)
        carried = Phase(between, stride=ranks_per_host, share=all_terms)
        return Phase(gather(ranks_per_host)), carried, back
    part = Fraction(1, ranks_per_host)
    carried = Phase(between, stride=ranks_per_host, groups=ranks_per_host, share=part)
    return inside, carried, Phase(all_gather(ranks_per_host))


def running(cluster: Cluster, num_bytes: float) -> tuple[str, tuple[Phase, ...]]:
    """Returns the name and phases of the algorithm that Unisono runs for this size of a tensor."""
    hosts, ranks = cluster.num_hosts, cluster.ranks_per_host
    if hosts == 1:
        # Through shared memory.
        return "exchange", phases_of("exchange", hosts, ranks)
    if ranks == 1:
        name = fastest_flat(hosts, int(num_bytes), cluster.between)
        return name, phases_of(name, hosts, ranks)
    names = _by_host(hosts, ranks)
    is_small = num_bytes <= SMALL_BYTES or num_bytes < first_bytes_for_parts(cluster)
    name = names[0] if is_small else names[-1]
    if name == "parts":
        return name, phases_of(name, hosts, ranks)
    carried = num_bytes * (ranks if name == "terms" else 1)
    between = fastest_flat(hosts, int(carried), cluster.between)
    return name, _by_host_phases(name, rounds_of(between, hosts), ranks)


def algorithms_for(num_hosts: int, ranks_per_host: int) -> list[str]:
    """Returns the names of the algorithms that differ on such a cluster."""
    return [*_FLAT, *_by_host(num_hosts, ranks_per_host)]


def hierarchical_for(num_hosts: int, ranks_per_host: int) -> str:
    """Returns the name of the hierarchical algorithm for large tensors."""
    return _by_host(num_hosts, ranks_per_host)[-1]


def _by_host(num_hosts: int, ranks_per_host: int) -> list[str]:
    if num_hosts == 1 or ranks_per_host == 1:
        return []
    is_branch = ranks_per_host & (ranks_per_host - 1) == 0
    return ["leaders", "parts"] if is_branch else ["terms"]


def rounds_of(algorithm: str, num_ranks: int) -> Rounds:
    """Returns a flat algorithm for this number of ranks."""
    return _FLAT[algorithm](num_ranks)


def fastest_flat(num_ranks: int, num_bytes: int, link: Link) -> str:
    """Returns the algorithm that ranks run for a tensor of this size."""
    if num_ranks in _LARGE:
        return _LARGE[num_ranks]
    # The choice changes at few sizes, so one power of two stands for all sizes up to the next.
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
    """Returns the size from which `parts` is faster than `leaders`; 0 if it always is."""
    shape = cluster.num_hosts, cluster.ranks_per_host
    leaders, parts = (line_of(phases_of(name, *shape), cluster) for name in ("leaders", "parts"))
    saved = leaders.per_byte - parts.per_byte
    lost = parts.latency - leaders.latency
    return max(0, round(lost / saved)) if saved > 0 else 1 << 62
