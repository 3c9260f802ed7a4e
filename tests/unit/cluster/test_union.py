from __future__ import annotations

from typing import Any

import pytest

from unisono.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    UnionClusterResolver,
    UnionResolver,
)
from unisono.errors import ClusterError


def simple(cluster: Any, **arguments: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **arguments)


def test_clusters_become_one_and_the_first_says_all_else() -> None:
    first = simple(
        {"worker": ["a:1", "b:1"]},
        task_type="worker",
        task_id=1,
        rpc_layer="grpc",
        environment="here",
        num_accelerators={"GPU": 3},
    )
    second = simple({"ps": ["c:1"], "worker": ["d:1"]}, task_type="ps", task_id=0)

    union = UnionClusterResolver(first, second)

    expected = {"worker": ["a:1", "b:1", "d:1"], "ps": ["c:1"]}
    assert union.cluster_spec().as_dict() == expected
    assert (union.task_type, union.task_id, union.environment) == ("worker", 1, "here")
    assert union.num_accelerators() == {"GPU": 3}
    assert union.master() == "grpc://b:1"
    assert union.master("ps", 0) == "grpc://c:1"
    assert UnionResolver is UnionClusterResolver


def test_what_is_given_counts_before_the_first() -> None:
    first = simple({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=1)

    union = UnionClusterResolver(first, task_type="worker", task_id=0, rpc_layer="x")

    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "x")


def test_tasks_by_number_are_joined_by_number() -> None:
    union = UnionClusterResolver(simple({"worker": ["a:1"]}), simple({"worker": {2: "b:1"}}))

    assert union.cluster_spec().as_dict() == {"worker": {0: "a:1", 2: "b:1"}}
    with pytest.raises(ClusterError, match="have task 2 of the job 'worker'"):
        UnionClusterResolver(*[simple({"worker": {2: f"{i}:1"}}) for i in "ab"]).cluster_spec()


@pytest.mark.parametrize("wrong", [(), ("worker",), (None,)])
def test_a_union_is_made_of_resolvers(wrong: Any) -> None:
    with pytest.raises(ClusterError, match="at least one cluster resolver"):
        UnionClusterResolver(*wrong)


def test_a_union_that_adds_nothing_is_started_by_the_launcher_of_the_first() -> None:
    first = simple({"worker": ["a:1", "a:2"]}, task_type="worker", task_id=1)
    override = simple(first.cluster_spec(), num_accelerators={"GPU": 1})

    assert UnionClusterResolver(first).launch() == first.launch()
    union = UnionClusterResolver(first, simple({"worker": ["a:3"]}))
    assert (union.launch().local_rank, union.launch().local_size) == (1, 3)
    assert override.num_accelerators() == {"GPU": 1}
