"""One suite for every communicator: all collectives, to the bit, at every number of ranks."""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from conformance.communicator_cases import failed_cases
from processes.certificates import CAN_MAKE, keys, new_authority
from processes.harness import run_ranks
from processes.pretended import Make, hierarchical
from thread_ranks import make_threads
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.communicator import Communicator, IdentityCommunicator
from unisono.communicators.connect import connect
from unisono.communicators.delegating import StagedCommunicator
from unisono.communicators.network import NetworkCommunicator
from unisono.communicators.shared_memory import SharedMemoryCommunicator
from unisono.costs import USUAL_LINK, Link
from unisono.kernels import native_core

SECONDS = 60.0
SIZES = (2, 3, 4, 5, 6, 8)
# Each further byte costs more than a step: every tensor goes in parts.
IN_PARTS = Link(1e-9, 1.0)
# On few cores a collective takes long, so each kind runs a part of the cases, another one each.
PART = {2: 6, 3: 6, 4: 6, 5: 6, 6: 6, 8: 8}
HAVE_NATIVE = native_core().kernel is not None


class Kind(NamedTuple):
    """How a communicator is made, at which sizes, and whether what it needs is there."""

    make: Make
    sizes: tuple[int, ...]
    is_there: bool = True


def over(backend: str, packed_bytes: int | None = None, constants: Link = USUAL_LINK) -> Make:
    def make(store: Store, rank: int, size: int) -> Communicator:
        return NetworkCommunicator(
            store,
            rank,
            size,
            backend=backend,
            timeout_seconds=SECONDS,
            packed_bytes=packed_bytes,
            constants=constants,
        )

    return make


def encrypted(store: Store, rank: int, size: int) -> Communicator:
    """TCP connections with certificates that rank 0 makes for all."""
    if rank == 0:
        made = keys(Path(tempfile.mkdtemp()), new_authority(), "host.test")
        store.set("settings", json.dumps(made))
    settings = json.loads(store.get("settings"))
    os.environ.update(settings)
    try:
        return over("tcp")(store, rank, size)
    finally:
        for name in settings:
            del os.environ[name]


def shared_memory(store: Store, rank: int, size: int) -> Communicator:
    return SharedMemoryCommunicator(store, rank, size, timeout_seconds=SECONDS)


KINDS = {
    "TCP": Kind(over("tcp"), (2, 3, 5, 8)),
    "TCP, little with the header": Kind(over("tcp", 4096), (2, 3)),
    "TCP, nothing with the header": Kind(over("tcp", 0), (2, 5)),
    "TCP, staged": Kind(lambda *rank: StagedCommunicator(over("tcp")(*rank)), (2,)),
    "TCP, in parts": Kind(over("tcp", constants=IN_PARTS), (3, 4)),
    "TCP, encrypted": Kind(encrypted, (2, 3), CAN_MAKE),
    "TCP inside two hosts": Kind(hierarchical(over("tcp"), 2, "tcp", seconds=SECONDS), (4, 6)),
    "gloo": Kind(over("gloo"), (2, 3, 5)),
    "gloo, nothing with the header": Kind(over("gloo", 0), (2, 3)),
    "gloo, in parts": Kind(over("gloo", constants=IN_PARTS), (3,)),
    "shared memory": Kind(shared_memory, SIZES, is_there=HAVE_NATIVE),
    "shared memory inside two hosts": Kind(
        hierarchical(shared_memory, 2, "gloo", seconds=SECONDS), (4, 6, 8), is_there=HAVE_NATIVE
    ),
    "shared memory inside three hosts": Kind(
        hierarchical(shared_memory, 3, "gloo", seconds=SECONDS), (6,), is_there=HAVE_NATIVE
    ),
    "what connect chooses": Kind(connect, (2, 3)),
}


def kinds_of(size: int) -> dict[str, Kind]:
    return {name: kind for name, kind in KINDS.items() if size in kind.sizes and kind.is_there}


def failures_by_kind(store: Store, rank: int, size: int) -> dict[str, list[str]]:
    failed = {}
    for number, (name, kind) in enumerate(kinds_of(size).items()):
        with kind.make(PrefixStore(name, store), rank, size) as communicator:
            step = PART.get(size, 1)
            failed[name] = failed_cases(communicator, slice(number % step, None, step))
            communicator.barrier()
    return failed


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_has_the_bits_of_the_tree_in_processes(size: int) -> None:
    expected: dict[str, list[str]] = {name: [] for name in kinds_of(size)}

    assert run_ranks(size, failures_by_kind, timeout=200) == [expected] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_collective_has_the_bits_of_the_tree_in_threads(size: int) -> None:
    step = PART.get(size, 1)
    with ThreadPoolExecutor(size) as pool:
        failed = list(
            pool.map(
                lambda communicator: failed_cases(communicator, slice(0, None, step)),
                make_threads(size, timeout_seconds=SECONDS),
            )
        )

    assert failed == [[]] * size


def test_every_collective_of_one_rank_alone_has_the_bits_of_the_tree() -> None:
    assert failed_cases(IdentityCommunicator()) == []
