"""What carries the collectives of a job, why, and what that will cost.

    one rank                             nothing
    all ranks on one host                shared memory
    several hosts with equal ranks       shared memory inside a host, an engine between hosts
    otherwise, or without a native core  an engine between all ranks

If the links were measured (`unisono tune`), hosts with equal numbers of ranks use what is predicted
to be faster, and the links set the sizes at which communicators change their algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from unisono.communicators.hosts import Layout
from unisono.costs import (
    BYTES_PER_PACK,
    USUAL_LINK,
    Cluster,
    Line,
    Link,
    Tuning,
    by_host,
    cost_line,
    first_bytes_for_parts,
)
from unisono.options import CommunicationImplementation

# From here on every rank carries its part between hosts; below, the first rank carries all.
PARTS_BYTES = 1 << 20


class Carrier(Enum):
    """What carries collectives between ranks."""

    NOTHING = "nothing"
    SHARED_MEMORY = "shared memory"
    HIERARCHICAL = "shared memory inside a host, an engine between hosts"
    FLAT = "an engine between all ranks"


class Engine(Enum):
    """What carries messages between hosts."""

    GLOO = "gloo"
    TCP = "tcp"
    MPI = "mpi"

    def __str__(self) -> str:
        return self.value.upper() if self is not Engine.GLOO else "Gloo"


@dataclass(frozen=True)
class Choice:
    """What to connect ranks with."""

    carrier: Carrier
    why: str
    engine: Engine = Engine.GLOO
    cost: Line | None = None
    parts_bytes: int = PARTS_BYTES
    link: Link = USUAL_LINK

    def __str__(self) -> str:
        if self.carrier is Carrier.HIERARCHICAL:
            return f"shared memory inside a host, {self.engine} between"
        return str(self.engine) if self.carrier is Carrier.FLAT else self.carrier.value


def choose(
    layout: Layout,
    *,
    has_native_core: bool,
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO,
    is_encrypted: bool = False,
    has_mpi: bool = False,
    tuning: Tuning | None = None,
) -> Choice:
    """Chooses for ranks on given hosts."""
    if layout.size == 1:
        return Choice(Carrier.NOTHING, "one rank has nothing to exchange")
    if implementation is CommunicationImplementation.RING:
        return _flat(Engine.GLOO, layout, "asked for", tuning)
    engine = Engine.GLOO
    why = ""
    if implementation is CommunicationImplementation.TCP:
        engine, why = Engine.TCP, "; TCP was asked for"
    elif is_encrypted:
        engine, why = Engine.TCP, "; TCP can be encrypted"
    elif has_mpi:
        engine, why = Engine.MPI, "; MPI has started all ranks"
    elif tuning is not None and tuning.is_tcp_faster:
        engine, why = Engine.TCP, "; TCP was measured to be faster than Gloo"
    if not has_native_core:
        return _flat(engine, layout, f"not every rank has a native core{why}", tuning)
    if len(layout.hosts) == 1:
        inside = None if tuning is None else tuning.inside
        cost = _cost("exchange", layout, inside, inside, tuning)
        return Choice(Carrier.SHARED_MEMORY, "all ranks are on one host", cost=cost)
    if len(layout.hosts) == layout.size:
        return _flat(engine, layout, f"no two ranks share a host{why}", tuning)
    if layout.is_regular:
        why = f"ranks by host are {layout}{why}"
        flat = _flat(engine, layout, why, tuning)
        return _faster(_hierarchical(engine, layout, why, tuning), flat, layout)
    told = f"ranks by host are {layout}, which differ between hosts or are not in order"
    return _flat(engine, layout, f"{told}{why}", tuning)


def _faster(levels: Choice, flat: Choice, layout: Layout) -> Choice:
    """Returns the choice with the lower predicted time for a pack; two levels if it is unknown."""
    if levels.cost is None or flat.cost is None:
        return levels
    levelled, alike = (cost.seconds(BYTES_PER_PACK) for cost in (levels.cost, flat.cost))
    if levelled <= alike:
        return levels
    why = (
        f"ranks by host are {layout}, and for {BYTES_PER_PACK >> 20} MiB the links as tuned "
        f"promise {1e3 * alike:.3g} ms, not {1e3 * levelled:.3g} ms by host"
    )
    return replace(flat, why=why)


def _between(engine: Engine, tuning: Tuning | None) -> Link | None:
    if tuning is None:
        return None
    return tuning.tcp or tuning.between if engine is Engine.TCP else tuning.between


def _hierarchical(engine: Engine, layout: Layout, why: str, tuning: Tuning | None) -> Choice:
    between = _between(engine, tuning)
    if tuning is None or tuning.inside is None or between is None:
        return Choice(Carrier.HIERARCHICAL, why, engine)
    cluster = _cluster(layout, tuning.inside, between, tuning)
    algorithm = by_host(cluster.num_hosts, cluster.ranks_per_host)[-1]
    return Choice(
        Carrier.HIERARCHICAL,
        why,
        engine,
        cost_line(algorithm, cluster),
        parts_bytes=first_bytes_for_parts(cluster),
        link=between,
    )


def _flat(engine: Engine, layout: Layout, why: str, tuning: Tuning | None) -> Choice:
    if tuning is None:
        return Choice(Carrier.FLAT, why, engine)
    slowest = tuning.loopback if len(layout.hosts) == 1 else _between(engine, tuning)
    # Two ranks swap all they have, which is as much as parts and sums, in one step.
    algorithm = "one step" if layout.size == 2 else "exchange"
    cost = _cost(algorithm, layout, tuning.loopback or slowest, slowest, tuning)
    return Choice(Carrier.FLAT, why, engine, cost, link=slowest or USUAL_LINK)


def _cost(
    algorithm: str, layout: Layout, inside: Link | None, between: Link | None, tuning: Tuning | None
) -> Line | None:
    if tuning is None or inside is None or between is None or not layout.is_regular:
        return None
    return cost_line(algorithm, _cluster(layout, inside, between, tuning))


def _cluster(layout: Layout, inside: Link, between: Link, tuning: Tuning) -> Cluster:
    num_hosts = len(layout.hosts)
    return Cluster(num_hosts, layout.size // num_hosts, inside, between, tuning.sum_rate)
