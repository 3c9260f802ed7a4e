"""The cost model: what a message on a link, a sum in memory and whole algorithms cost.

A link that carries m messages and n bytes at once is busy for

    latency + (m - 1) overhead + n / bandwidth

The latency is paid once: messages of one round are under way together. A rank that sends many of
them still needs the overhead for each further one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from unisono.algorithms import Gather, Schedule
from unisono.algorithms.rounds import Rounds, doubling, exchange, one_step
from unisono.errors import TuningError
from unisono.packing import Line

# A guess, if only pairs were measured: each further message costs this part of the first.
OVERHEAD_SHARE = 0.2


@dataclass(frozen=True)
class Link:
    """A link between two memories.

    Args:
        latency: Seconds from the beginning of a message to its end, if it is empty.
        bandwidth: Bytes per second.
        overhead: Seconds for each further message of a round; a fifth of the latency if not given.
    """

    latency: float
    bandwidth: float
    overhead: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.overhead):
            object.__setattr__(self, "overhead", OVERHEAD_SHARE * self.latency)
        constants = (self.latency, self.bandwidth, self.overhead)
        are_right = all(map(math.isfinite, constants)) and min(constants) >= 0
        if not are_right or self.bandwidth == 0:
            raise TuningError(
                "A link has a latency and an overhead of 0 s or more and a bandwidth above 0 B/s, "
                f"got {self.latency}, {self.overhead} and {self.bandwidth}. Measure it again with "
                "`unisono tune`."
            )

    def seconds(self, num_messages: int, num_bytes: float) -> float:
        """Returns how long the link is busy with messages that are sent at the same time."""
        if num_messages == 0:
            return 0.0
        further = (num_messages - 1) * self.overhead
        return self.latency + further + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Equal hosts, and the costs of their links.

    Args:
        num_hosts: The number of hosts.
        ranks_per_host: The number of ranks per host.
        inside: The link that each rank has inside its host.
        between: The link that each host has to the others, which its ranks share.
        memory_rate: Bytes per second that a rank reads and writes in a sum.
    """

    num_hosts: int
    ranks_per_host: int
    inside: Link
    between: Link
    memory_rate: float

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.ranks_per_host < 1 or self.memory_rate <= 0:
            raise TuningError(
                "A cluster has at least one host with one rank and a memory rate above 0 B/s, got "
                f"{self.num_hosts} hosts of {self.ranks_per_host} and {self.memory_rate} B/s."
            )


# A guess, without a measurement: a step costs as much as 64 KB.
USUAL_LINK = Link(latency=64e-6, bandwidth=1.024e9)
# Up to here every rank receives from all others in each collective, so errors name the right ranks.
_FEW_RANKS = 8
# Up to here the first rank of a host sends everything, because another copy inside the host costs
# less than another step.
SMALL_BYTES = 64 << 10
# Sums are fast beside a link; their rate hardly changes what is best.
_SUM_RATE = 1e10
_FLAT: dict[str, Callable[[int], Rounds]] = {
    "one step": one_step,
    "exchange": exchange,
    "doubling": doubling,
}


def schedule_seconds(
    schedule: Schedule, memories: Sequence[Hashable], link: Link, memory: Link, num_bytes: float
) -> float:
    """Returns how long a schedule between devices of one process takes for such tensors.

    A move starts when its devices are free, so moves between different devices overlap. Everything
    that a root receives or sends goes through its one link. Values in the root's own memory are not
    copied.
    """
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
    """Returns what `schedule_seconds` says as a line."""
    return Line.through(functools.partial(schedule_seconds, schedule, memories, link, memory))


def rounds_of(algorithm: str, num_ranks: int) -> Rounds:
    """Returns a flat algorithm for this number of ranks."""
    return _FLAT[algorithm](num_ranks)


def by_host(num_hosts: int, ranks_per_host: int) -> list[str]:
    """Returns the hierarchical algorithms for small and for large tensors, if there are any.

    Flat algorithms treat all ranks alike. These sum inside each host first. With `leaders`, the
    first rank of a host sends everything to the other hosts; with `parts`, each rank of a host
    sends its part. The sum of a host is a branch of the tree only if the host has 2, 4, 8, ...
    ranks. Otherwise the first rank sends all `terms`, one by one.
    """
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
    return Line.through(functools.partial(seconds, algorithm, cluster))


def seconds(algorithm: str, cluster: Cluster, num_bytes: float) -> float:
    """Returns how long an all-reduce of `num_bytes` per rank takes; `doubling`, on hosts of one.

    This is the closed form of what `unisono_tools.pricing` finds for the rounds of any algorithm.
    """
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
