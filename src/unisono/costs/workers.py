"""What the all-reduces that Unisono runs between workers cost, in closed form.

Flat algorithms treat all ranks alike. The others sum inside each host first. With `leaders`, the
first rank of a host sends everything to the other hosts; with `parts`, each rank of a host sends
its part. The sum of a host is a branch of the tree only if the host has 2, 4, 8, ... ranks.
Otherwise the first rank sends all `terms`, one by one. `unisono_tools.pricing` prices the rounds of
any algorithm, and gives the same numbers for these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from unisono.algorithms import Rounds, doubling, exchange, one_step
from unisono.costs.links import Cluster, Line, Link

# A guess, without a measurement: a step costs as much as 64 KB.
USUAL_LINK = Link(latency=64e-6, bandwidth=1.024e9)
# Up to here every rank receives from all others in each collective, so errors name the right ranks.
_FEW_RANKS = 8
# Up to here the first rank of a host sends everything, because another copy inside the host costs
# less than another step.
SMALL_BYTES = 64 << 10
# Sums are fast beside a link; their rate hardly changes what is best.
_SUM_RATE = 1e10
_FAR_BYTES = 1 << 40
_FLAT: dict[str, Callable[[int], Rounds]] = {
    "one step": one_step,
    "exchange": exchange,
    "doubling": doubling,
}


def rounds_of(algorithm: str, num_ranks: int) -> Rounds:
    """Returns a flat algorithm for this number of ranks."""
    return _FLAT[algorithm](num_ranks)


def by_host(num_hosts: int, ranks_per_host: int) -> list[str]:
    """Returns the hierarchical algorithms for small and for large tensors, if there are any."""
    if num_hosts == 1 or ranks_per_host == 1:
        return []
    is_branch = ranks_per_host & (ranks_per_host - 1) == 0
    return ["leaders", "parts"] if is_branch else ["terms"]


def fastest_flat(num_ranks: int, num_bytes: int, link: Link) -> str:
    """Returns the algorithm that all ranks run for a tensor of this size."""
    if num_ranks == 2:
        # They swap everything: the same number of bytes as in an exchange, in one step.
        return "one step"
    # The choice changes at few sizes, so one power of two stands for all sizes up to the next.
    return _fastest_flat(num_ranks, num_bytes.bit_length(), link)


@functools.lru_cache(maxsize=1024)
def _fastest_flat(num_ranks: int, num_bits: int, link: Link) -> str:
    cluster = Cluster(num_ranks, 1, link, link, _SUM_RATE)
    small = "one step" if num_ranks <= _FEW_RANKS else "doubling"
    return min((small, "exchange"), key=lambda name: seconds(name, cluster, (1 << num_bits) - 1))


def first_bytes_for_parts(cluster: Cluster) -> int:
    """Returns the size from which `parts` is faster than `leaders`; 0 if it always is."""
    leaders, parts = (cost_line(name, cluster) for name in ("leaders", "parts"))
    saved = leaders.per_byte - parts.per_byte
    lost = parts.latency - leaders.latency
    return max(0, round(lost / saved)) if saved > 0 else 1 << 62


def cost_line(algorithm: str, cluster: Cluster) -> Line:
    """Returns the cost of an all-reduce as a line, from an empty tensor to a huge one."""
    latency = seconds(algorithm, cluster, 0)
    return Line(latency, (seconds(algorithm, cluster, _FAR_BYTES) - latency) / _FAR_BYTES)


def seconds(algorithm: str, cluster: Cluster, num_bytes: float) -> float:
    """Returns how long an all-reduce of `num_bytes` per rank takes; `doubling`, on hosts of one."""
    hosts, ranks, rate = cluster.num_hosts, cluster.ranks_per_host, cluster.memory_rate
    if algorithm == "doubling":
        levels = (hosts - 1).bit_length()
        # Ranks that hold no branch of the tree send several sums.
        sums = [1 if hosts == 1 << levels else max(i + 1, 2 * i - 1) for i in range(levels)]
        sent = sum(cluster.between.seconds(1, number * num_bytes) for number in sums)
        return sent + levels * 3 * num_bytes / rate

    def inside(share: float) -> float:
        return cluster.inside.seconds(ranks - 1, (ranks - 1) * share * num_bytes)

    if algorithm in _FLAT:
        others = (hosts - 1) * ranks

        def to_all(share: float) -> float:
            carried = ranks * others * share * num_bytes
            return max(inside(share), cluster.between.seconds(others, carried))

        return _all_to_all(algorithm, hosts * ranks, to_all, num_bytes / rate)

    # What a rank carries to other hosts, and how many ranks of a host do.
    carried, carriers = {"leaders": (1.0, 1), "parts": (1 / ranks, ranks), "terms": (ranks, 1)}[
        algorithm
    ]

    def between(share: float) -> float:
        sent = (hosts - 1) * share * carried * carriers * num_bytes
        return cluster.between.seconds(hosts - 1, sent)

    name = "one step" if hosts == 2 else "exchange"
    there = _all_to_all(name, hosts, between, carried * num_bytes / rate)
    if algorithm == "terms":
        return inside(1) + there + inside(1)
    here = _all_to_all("exchange", ranks, inside, num_bytes / rate)
    return here + there + inside(1 / ranks if algorithm == "parts" else 1)


def _all_to_all(
    algorithm: str, num_ranks: int, to_all: Callable[[float], float], sum_seconds: float
) -> float:
    """Prices rounds of messages `to_all`, given the share of each, and the sum of all terms."""
    if num_ranks == 1:
        return 0.0
    if algorithm == "one step":
        return to_all(1) + (num_ranks + 1) * sum_seconds
    return 2 * to_all(1 / num_ranks) + (num_ranks + 1) / num_ranks * sum_seconds
