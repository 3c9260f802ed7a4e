"""What hooks keep for replicas, when workers that had it are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from worker_threads import on_workers

from unisono.errors import UnsupportedError
from unisono.reductions import ReplicaLayout, dealt
from unisono.workers import ConnectedWorkers
from unisono.workers.replica_hooks import Contents, Kept, exchanged, told


def content(replica: int) -> Any:
    """It has tensors of different lengths, as the parts that replicas add up have."""
    return {0: torch.full((replica,), 0.1), 1: torch.tensor(replica), "calls": 4 + replica}


def plain(contents: Contents | None) -> Any:
    assert contents is not None
    return {i: (one[0].tolist(), int(one[1]), one["calls"]) for i, one in sorted(contents.items())}


def kept_by(
    num_workers: int, num_replicas: int, content: Callable[[int], Any] = content
) -> dict[int, Kept]:
    """What each worker has after a run. The numbers of workers are 10, 11 and so on."""

    def tell(workers: ConnectedWorkers) -> Kept:
        communicator = workers.communicator
        layout = ReplicaLayout(dealt(num_replicas, num_workers), communicator.rank)
        own = {replica: content(replica) for replica in layout.own}
        return told(communicator, range(10, 10 + num_workers), layout.ranges, own)

    return dict(enumerate(on_workers(num_workers, tell), start=10))


def exchange(kept: dict[int, Kept | None]) -> list[Any]:
    def meet(workers: ConnectedWorkers) -> Any:
        numbers = sorted(kept)
        own = kept[numbers[workers.communicator.rank]]
        return exchanged(workers.communicator, numbers, own)

    return on_workers(len(kept), meet)


@pytest.mark.parametrize("lost", [10, 11, 12])
def test_survivors_and_newcomers_have_what_a_lost_worker_had(lost: int) -> None:
    kept: dict[int, Kept | None] = {**kept_by(3, 4), 15: None}
    del kept[lost]

    for found in exchange(kept):
        assert plain(found) == plain({i: content(i) for i in range(4)})


def test_who_has_all_needs_no_parts() -> None:
    kept: dict[int, Kept | None] = {**kept_by(4, 4)}
    of_all = {i: content(i) for i in range(4)}

    for found in exchange({10: Kept(of_all, [], {}, {}), 13: kept[13]}):
        assert plain(found) == plain(of_all)
    assert exchange({10: None, 11: None}) == [None, None]


def test_what_two_lost_workers_had_is_lost() -> None:
    kept = kept_by(4, 4)

    with pytest.raises(UnsupportedError, match=r"Several workers.*replica 1"):
        exchange({10: kept[10], 13: kept[13]})


def test_without_tensors_nothing_is_lost() -> None:
    """As with torch's own hooks that only convert gradients."""
    kept = kept_by(4, 4, lambda replica: ["calls", replica])

    for found in exchange({10: kept[10], 13: kept[13]}):
        assert found == {i: ["calls", i] for i in range(4)}
