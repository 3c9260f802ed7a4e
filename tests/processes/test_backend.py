"""The torch.distributed backend, in real processes, against Gloo."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import Store

from processes.backend_cases import CASES, LENGTHS, MORE_DTYPES, World, joined
from processes.backend_training import WRAPS, train, train_unevenly
from processes.harness import run_ranks

pytestmark = pytest.mark.backend

connect: Any = importlib.import_module("unisono.communicators.connect")


def differences(
    store: Store, rank: int, size: int, ranks_a_host: int, only: torch.dtype | None = None
) -> list[str]:
    """The cases in which "unisono" and Gloo do not do the same; each is done twice."""
    connect.host_identity = lambda: f"host {rank // ranks_a_host}"
    with joined(store, rank, size):
        gloo = distributed.new_group(backend="gloo")
        ours, theirs = World(None, rank, size), World(gloo, rank, size)
        return [
            f"{name} of {length} {dtype}, time {time}"
            for name, case, dtypes in CASES
            for dtype in dtypes
            if only in (dtype, None)
            for length in LENGTHS
            for time in (1, 2)
            if not _are_equal(
                case(ours, length, dtype),
                [t.to(dtype) for t in case(theirs, length, _for_gloo(dtype))],
            )
        ]


def _for_gloo(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in MORE_DTYPES else dtype


def _are_equal(ours: Any, theirs: Any) -> bool:
    return all(
        own.dtype is other.dtype and torch.equal(own, other)
        for own, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_does_what_gloo_does(size: int) -> None:
    assert run_ranks(size, differences, size) == [[]] * size


@pytest.mark.parametrize(("size", "ranks_a_host"), [(3, 1), (4, 2)])
def test_every_collective_does_between_hosts_what_gloo_does(size: int, ranks_a_host: int) -> None:
    assert run_ranks(size, differences, ranks_a_host, torch.float32) == [[]] * size


def unequal_trainings(store: Store, rank: int, size: int) -> list[str]:
    """The ways to train that end otherwise over Gloo than over "unisono"."""
    with joined(store, rank, size):
        ours = distributed.group.WORLD
        gloo = distributed.new_group(backend="gloo")
        unequal = [
            name
            for name in WRAPS
            if not _are_equal(train(name, ours, rank), train(name, gloo, rank))
        ]
        if not _are_equal(train_unevenly(ours, rank), train_unevenly(gloo, rank)):
            unequal.append("uneven inputs")
        return unequal


def test_training_ends_as_over_gloo() -> None:
    # Two terms have one order only, so all bits must agree.
    assert run_ranks(2, unequal_trainings) == [[], []]
