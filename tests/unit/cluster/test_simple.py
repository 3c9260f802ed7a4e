from __future__ import annotations

import pytest

from unisono.cluster_resolver import ClusterSpec, SimpleClusterResolver
from unisono.errors import ClusterError
from unisono.testing import virtual_gpus

CLUSTER = {"worker": ["a:1", "b:1"]}


def test_the_arguments_are_the_answers() -> None:
    found = SimpleClusterResolver(
        ClusterSpec(CLUSTER), task_type="worker", task_id=1, environment="lab", rpc_layer="grpc"
    )

    assert found.cluster_spec() == ClusterSpec(CLUSTER)
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert (found.environment, found.rpc_layer) == ("lab", "grpc")
    assert found.master() == "grpc://b:1"


def test_the_master_given_is_returned_where_no_task_is_named() -> None:
    found = SimpleClusterResolver(CLUSTER, master="m:1", task_type="worker", task_id=1)

    assert found.master() == "m:1"
    assert found.master("worker", 0) == "a:1"


def test_without_a_task_there_is_no_master() -> None:
    assert SimpleClusterResolver(CLUSTER).master() == ""


def test_accelerators_are_counted_or_given() -> None:
    given = SimpleClusterResolver(CLUSTER, num_accelerators={"GPU": 7})
    counted = SimpleClusterResolver(CLUSTER, task_type="worker", task_id=0)

    assert given.num_accelerators() == {"GPU": 7}
    assert given.num_accelerators("worker", 1) == {"GPU": 7}
    assert counted.num_accelerators("worker", 0) == counted.num_accelerators()


@pytest.mark.gpu
def test_gpus_are_counted() -> None:
    with virtual_gpus(3):
        assert SimpleClusterResolver(CLUSTER).num_accelerators() == {"GPU": 3}


def test_the_accelerators_of_another_process_are_not_known() -> None:
    found = SimpleClusterResolver(CLUSTER, task_type="worker", task_id=0)

    with pytest.raises(ClusterError, match=r"this process, worker 0, are known.*of worker 1"):
        found.num_accelerators("worker", 1)


def test_a_task_outside_of_the_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="task 2"):
        SimpleClusterResolver(CLUSTER, task_type="worker", task_id=2)
