"""What carries the collectives of a job, and why."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from unisono.communicators.hosts import Layout
from unisono.options import CommunicationImplementation


class Carrier(Enum):
    """What carries collectives between ranks."""

    NOTHING = "nothing"
    SHARED_MEMORY = "shared memory"
    HIERARCHICAL = "shared memory inside a host, TCP between"
    TCP = "TCP"
    GLOO = "Gloo"


class CarrierChoice(NamedTuple):
    """What carries the collectives, and in words why."""

    carrier: Carrier
    reason: str


def choose_carrier(
    layout: Layout,
    *,
    has_native_core: bool,
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO,
) -> CarrierChoice:
    """Returns what suits ranks on the hosts of `layout`.

        one rank                             nothing
        all ranks on one host                shared memory
        several hosts with as many ranks     shared memory inside a host, TCP between
        otherwise, or without a native core  TCP

    Args:
        layout: Where the ranks are.
        has_native_core: Whether every rank has the native core, which memory is shared through.
        implementation: What was asked for; `RING` is Gloo between all ranks.
    """
    if layout.size == 1:
        return CarrierChoice(Carrier.NOTHING, "one rank has nobody to talk to")
    if implementation is CommunicationImplementation.RING:
        return CarrierChoice(Carrier.GLOO, "asked for")
    if not has_native_core:
        return CarrierChoice(Carrier.TCP, "not every rank has a native core")
    if len(layout.hosts) == 1:
        return CarrierChoice(Carrier.SHARED_MEMORY, "all ranks are on one host")
    if len(layout.hosts) == layout.size:
        return CarrierChoice(Carrier.TCP, "no two ranks share a host")
    if layout.is_regular:
        return CarrierChoice(Carrier.HIERARCHICAL, f"ranks by host are {layout}")
    return CarrierChoice(
        Carrier.TCP,
        f"ranks by host are {layout}, which is not as many on each, one host after the other",
    )
