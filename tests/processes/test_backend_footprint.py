"""What groups of the torch.distributed backend take, and that all of it is given back."""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store

from processes.backend_cases import joined
from processes.harness import run_ranks
from processes.leftovers import Holdings, settled
from unisono.errors import UnsupportedError
from unisono_tools.namespaces import enter, make_hosts

pytestmark = pytest.mark.backend

NUM_GROUPS = 12
ANY = Holdings(*[1_000_000] * 4)

connect: Any = importlib.import_module("unisono.communicators.connect")


def footprint(
    store: Store, rank: int, size: int, backend: str, gloo: dict[str, Holdings] | None = None
) -> dict[str, Holdings]:
    """What is held before, with one, two and a dozen groups, at the end, and once again.

    With what Gloo held, threads that end by themselves are given the time to do so.
    """

    def at_rest(when: str) -> Holdings:
        return Holdings.now() if gloo is None else settled(ANY._replace(threads=gloo[when].threads))

    held = {"before": Holdings.now()}
    _begin(store, rank, size, backend)
    held["one group"] = at_rest("one group")
    groups: list[Any] = []
    for number in (2, NUM_GROUPS):
        groups += [distributed.new_group() for _ in range(number - 1 - len(groups))]
        for group in groups:
            _use(group, size)
        held[f"{number} groups"] = at_rest(f"{number} groups")
    for group in groups:
        distributed.destroy_process_group(group)
    del group, groups
    held["without them"] = settled(held["one group"])
    held["at the end"] = _end(held["before"])
    _begin(store, rank, size, backend)
    held["one group again"] = at_rest("one group again")
    _end(held["before"])
    return held


def _begin(store: Store, rank: int, size: int, backend: str) -> None:
    number = store.add(f"visits of {rank}", 1)
    own = PrefixStore(f"visit {number}", store)
    distributed.init_process_group(backend, store=own, rank=rank, world_size=size)
    _use(None, size)


def _end(before: Holdings) -> Holdings:
    distributed.barrier()
    distributed.destroy_process_group()
    return settled(before)


def _use(group: Any, size: int) -> None:
    distributed.all_reduce(torch.ones(9), group=group)
    distributed.all_reduce(torch.ones(9), group=group, async_op=True).wait()
    distributed.all_to_all_single(torch.empty(size), torch.ones(size), group=group)


def of_both(
    store: Store, rank: int, size: int, num_hosts: int, names: list[str]
) -> list[dict[str, Holdings]]:
    number = rank * num_hosts // size
    if names:
        enter(names[number])
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    else:
        connect.host_identity = lambda: f"host {number}"
    gloo = footprint(store, rank, size, "gloo")
    return [gloo, footprint(store, rank, size, "unisono", gloo)]


@pytest.mark.parametrize(("size", "num_hosts"), [(3, 1), (2, 2)])
def test_groups_take_no_more_than_those_of_gloo_and_leave_nothing(
    size: int, num_hosts: int
) -> None:
    with ExitStack() as stack:
        names: list[str] = []
        if num_hosts > 1:
            # Where there can be none, processes pretend to be on different hosts.
            with suppress(UnsupportedError):
                names = stack.enter_context(make_hosts(num_hosts)).names
        results = run_ranks(size, of_both, num_hosts, names)
    for gloo, ours in results:
        for when in gloo:
            if "group" in when:
                assert ours[when].threads <= gloo[when].threads, (when, ours, gloo)
                assert ours[when].descriptors <= gloo[when].descriptors, (when, ours, gloo)
        assert ours["without them"].is_within(ours["one group"]), ours
        assert ours["at the end"].is_within(ours["before"]), ours


def split(store: Store, rank: int, size: int) -> list[Any]:
    with joined(store, rank, size):
        world: Any = distributed.group.WORLD
        told: list[Any] = []
        for ranks in ([0, 2], [0, 2], [1]):
            part = world.split_group(ranks)
            if part is None:
                told.append(None)
                continue
            number = torch.tensor([float(rank + 1)])
            part.allreduce([number]).wait()
            told.append((part.getBackendName(), part.rank(), part.size(), number.item()))
            part.shutdown()
        return told


def test_a_group_is_split() -> None:
    first, second, third = run_ranks(3, split)

    assert first == [("unisono", 0, 2, 4.0), ("unisono", 0, 2, 4.0), None]
    assert second == [None, None, ("unisono", 0, 1, 2.0)]
    assert third == [("unisono", 1, 2, 4.0), ("unisono", 1, 2, 4.0), None]
