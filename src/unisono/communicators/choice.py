"""What carries the collectives of a job, by links that were measured, and what that will cost.

Where the links were measured (`unisono tune`), hosts with as many ranks have what is predicted to
be faster, and the sizes at which communicators go another way are those of the links. Otherwise it
is what `choose_carrier` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.communicators.hosts import Layout
from unisono.communicators.selection import Carrier, choose_carrier
from unisono.costs import (
    BYTES_PER_PACK,
    STEP_BYTES,
    Cluster,
    Line,
    Link,
    Tuning,
    first_bytes_for_parts,
    hierarchical_for,
    line_of,
    phases_of,
    step_bytes,
)
from unisono.options import CommunicationImplementation

# From here on every rank carries its part between hosts; below, the first rank carries all.
PARTS_BYTES = 1 << 20


@dataclass(frozen=True)
class Choice:
    """What to connect ranks with.

    Attributes:
        carrier: What carries collectives.
        why: The reason, in words.
        cost: What an all-reduce is predicted to cost; None if that is not known.
        parts_bytes: From how many bytes on every rank of a host carries its part.
        step_bytes: How many bytes more one step may send than two.
    """

    carrier: Carrier
    why: str
    cost: Line | None = None
    parts_bytes: int = PARTS_BYTES
    step_bytes: int = STEP_BYTES


def choose(
    layout: Layout,
    *,
    has_native_core: bool,
    implementation: CommunicationImplementation,
    tuning: Tuning | None,
) -> Choice:
    """Chooses for ranks on given hosts.

    Args:
        layout: Where the ranks are.
        has_native_core: Whether every rank has the native core, which memory is shared through.
        implementation: What was asked for.
        tuning: The constants of the links, the same on all ranks.
    """
    carrier, why = choose_carrier(
        layout, has_native_core=has_native_core, implementation=implementation
    )
    if carrier is Carrier.HIERARCHICAL:
        flat = _flat(Carrier.TCP, layout, why, tuning)
        return _faster(_hierarchical(layout, why, tuning), flat, layout)
    if carrier in (Carrier.TCP, Carrier.GLOO):
        return _flat(carrier, layout, why, tuning)
    inside = None if tuning is None else tuning.inside
    return Choice(carrier, why, _cost("exchange", layout, inside, inside, tuning))


def _faster(levels: Choice, flat: Choice, layout: Layout) -> Choice:
    """Returns the choice with the lower predicted time for a pack; two levels if it is unknown."""
    if levels.cost is None or flat.cost is None:
        return levels
    by_host, alike = (cost.seconds(BYTES_PER_PACK) for cost in (levels.cost, flat.cost))
    if by_host <= alike:
        return levels
    why = (
        f"ranks by host are {layout}, and for {BYTES_PER_PACK >> 20} MiB the links as tuned "
        f"promise {1e3 * alike:.3g} ms, not {1e3 * by_host:.3g} ms by host"
    )
    return replace(flat, why=why)


def _hierarchical(layout: Layout, why: str, tuning: Tuning | None) -> Choice:
    if tuning is None or tuning.inside is None or tuning.between is None:
        return Choice(Carrier.HIERARCHICAL, why)
    cluster = _cluster(layout, tuning.inside, tuning.between, tuning)
    shape = cluster.num_hosts, cluster.ranks_per_host
    return Choice(
        Carrier.HIERARCHICAL,
        why,
        _cost(hierarchical_for(*shape), layout, tuning.inside, tuning.between, tuning),
        parts_bytes=first_bytes_for_parts(cluster),
        step_bytes=step_bytes(tuning.between),
    )


def _flat(carrier: Carrier, layout: Layout, why: str, tuning: Tuning | None) -> Choice:
    if tuning is None:
        return Choice(carrier, why)
    slowest = tuning.loopback if len(layout.hosts) == 1 else tuning.between
    # Two ranks swap all they have, which is as much as parts and sums, in one step.
    algorithm = "one step" if layout.size == 2 else "exchange"
    return Choice(
        carrier,
        why,
        _cost(algorithm, layout, tuning.loopback or slowest, slowest, tuning),
        step_bytes=STEP_BYTES if slowest is None else step_bytes(slowest),
    )


def _cost(
    algorithm: str, layout: Layout, inside: Link | None, between: Link | None, tuning: Tuning | None
) -> Line | None:
    if tuning is None or inside is None or between is None or not layout.is_regular:
        return None
    cluster = _cluster(layout, inside, between, tuning)
    return line_of(phases_of(algorithm, cluster.num_hosts, cluster.ranks_per_host), cluster)


def _cluster(layout: Layout, inside: Link, between: Link, tuning: Tuning) -> Cluster:
    num_hosts = len(layout.hosts)
    return Cluster(num_hosts, layout.size // num_hosts, inside, between, tuning.sum_rate)
