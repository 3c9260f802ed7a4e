"""Hosts that are only pretended: all ranks are on this one, and talk as if they were not."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.communicator import Communicator
from unisono.communicators.hierarchical import HierarchicalCommunicator
from unisono.communicators.hosts import Layout
from unisono.communicators.link import Part
from unisono.communicators.network import NetworkCommunicator
from unisono.communicators.watch import Watch

Make = Callable[[Store, int, int], Communicator]


def hierarchical(inside: Make, num_hosts: int, backend: str, *, seconds: float) -> Make:
    """Makes `num_hosts` hosts of one, with what `inside` makes on each of them."""

    def make(store: Store, rank: int, size: int) -> Communicator:
        layout = Layout.of([f"host {other * num_hosts // size}" for other in range(size)])
        host, position = layout.place(rank)
        watch = Watch(PrefixStore("watch", store), rank, size, timeout_seconds=seconds)
        between = NetworkCommunicator(
            PrefixStore(f"between {position}", store),
            host,
            num_hosts,
            backend=backend,
            timeout_seconds=seconds,
            part=Part(watch, [ranks[position] for ranks in layout.hosts], layout.hosts),
        )
        of_host = inside(PrefixStore(f"inside {host}", store), position, size // num_hosts)
        return HierarchicalCommunicator(of_host, between, layout, watch)

    return make
