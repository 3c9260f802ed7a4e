"""Which worker has which replicas."""

from __future__ import annotations

import pytest
from worker_threads import on_workers

from unisono.errors import ReplicaMismatchError
from unisono.reductions import ReplicaLayout, Workers, dealt
from unisono.workers import ConnectedWorkers
from unisono.workers.terms import tree_terms, whole_terms


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("num_replicas", [5, 6, 8, 13])
def test_replicas_are_dealt_evenly_and_in_order(num_replicas: int, num_workers: int) -> None:
    counts = dealt(num_replicas, num_workers)

    assert sum(counts) == num_replicas
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)
    owned = [i for rank in range(num_workers) for i in ReplicaLayout(counts, rank).own]
    assert owned == list(range(num_replicas))


def test_a_worker_brings_all_its_replicas_once() -> None:
    for rank, own in enumerate([[slice(0, 2), slice(2, 3)], [slice(0, 1), slice(1, 3)]]):
        assert tree_terms(ReplicaLayout((3, 3, 2), rank)).own == own
        assert whole_terms(ReplicaLayout((3, 3, 2), rank)).own == [slice(0, 3)]
    assert tree_terms(ReplicaLayout((3, 3), 1)).own == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert tree_terms(ReplicaLayout((4, 4), 1)).own == [slice(0, 4)]
    assert tree_terms(ReplicaLayout((2, 1), 1)).own == [slice(0, 1)]
    # So its one replica travels in the dtype of the sums of others.
    assert tree_terms(ReplicaLayout((2, 1), 1)).are_sums
    assert not tree_terms(ReplicaLayout((3, 3), 1)).are_sums


def test_workers_have_the_same_number_unless_it_is_given() -> None:
    assert Workers().layout(3) == ReplicaLayout((3,), 0)
    found = on_workers(2, lambda workers: workers.layout(3))
    assert found == [ReplicaLayout((3, 3), rank) for rank in range(2)]


def test_a_value_has_a_component_per_replica_where_workers_differ() -> None:
    def call(workers: ConnectedWorkers) -> str:
        dealt_out = ConnectedWorkers(workers.communicator, (3, 2))
        with pytest.raises(ReplicaMismatchError) as caught:
            dealt_out.layout(1)
        return str(caught.value)

    assert "1 components on worker 0, which has 3 of the 5 replicas" in on_workers(2, call)[0]
