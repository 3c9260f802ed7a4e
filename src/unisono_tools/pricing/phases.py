"""The algorithms between workers as phases of rounds, also those that Unisono does not run.

Flat algorithms treat all ranks alike. The others sum inside each host first. The module
`unisono.costs.model` explains them.
"""

from __future__ import annotations

import functools
from fractions import Fraction

from unisono.algorithms.rounds import Rounds, doubling, exchange, one_step
from unisono.costs import SMALL_BYTES, Cluster, by_host, fastest_flat, first_bytes_for_parts
from unisono.errors import UnsupportedError
from unisono_tools.pricing.halving import halving
from unisono_tools.pricing.inside import all_gather, gather, spread
from unisono_tools.pricing.ring import ring
from unisono_tools.pricing.rounds import Phase
from unisono_tools.pricing.tree import tree

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
    # Two hosts swap everything: the same number of bytes, in one step.
    between = (one_step if num_hosts == 2 else exchange)(num_hosts)
    return _by_host_phases(algorithm, between, ranks_per_host)


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
    names = by_host(hosts, ranks)
    is_small = num_bytes <= SMALL_BYTES or num_bytes < first_bytes_for_parts(cluster)
    name = names[0] if is_small else names[-1]
    if name == "parts":
        return name, phases_of(name, hosts, ranks)
    carried = num_bytes * (ranks if name == "terms" else 1)
    between = fastest_flat(hosts, int(carried), cluster.between)
    return name, _by_host_phases(name, _FLAT[between](hosts), ranks)


def algorithms_for(num_hosts: int, ranks_per_host: int) -> list[str]:
    """Returns the names of the algorithms that differ on such a cluster."""
    return [*_FLAT, *by_host(num_hosts, ranks_per_host)]
