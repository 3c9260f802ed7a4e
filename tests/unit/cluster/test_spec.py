from __future__ import annotations

from typing import Any

import pytest

from unisono.cluster import ClusterSpec
from unisono.cluster.spec import rank_of, validate
from unisono.errors import ClusterError

CLUSTER: dict[str, list[str | None]] = {
    "chief": ["c:1"],
    "worker": ["a:1", "b:1", "[::1]:1"],
}


WORKERS = ClusterSpec({"worker": ["a:1", "b:1", "c:1"]})
ALONE = ClusterSpec({})


def test_a_spec_tells_its_jobs_and_tasks() -> None:
    spec = ClusterSpec(CLUSTER)

    assert spec.jobs == ["chief", "worker"]
    assert spec.num_tasks("worker") == 3
    assert spec.task_indices("worker") == [0, 1, 2]
    assert spec.job_tasks("worker") == ["a:1", "b:1", "[::1]:1"]
    assert spec.task_address("worker", 1) == "b:1"
    assert spec.as_dict() == CLUSTER


def test_equal_clusters_are_equal_specs() -> None:
    spec = ClusterSpec(CLUSTER)

    assert ClusterSpec(spec) == spec == ClusterSpec(dict(reversed(CLUSTER.items())))
    assert hash(ClusterSpec(spec)) == hash(ClusterSpec(dict(reversed(CLUSTER.items()))))
    assert spec != ClusterSpec({"worker": ["a:1"]})
    assert spec != CLUSTER


def test_only_a_spec_without_jobs_is_false() -> None:
    assert not ClusterSpec({})
    assert ClusterSpec(CLUSTER)


def test_a_spec_does_not_change_with_what_it_was_made_of() -> None:
    cluster: dict[str, list[str | None]] = {"worker": ["a:1"]}
    spec = ClusterSpec(cluster)

    cluster["worker"].append("b:1")
    copied: Any = spec.as_dict()["worker"]
    copied.append("c:1")

    assert spec.job_tasks("worker") == ["a:1"]


def test_an_address_that_is_not_known_is_refused_where_it_is_needed() -> None:
    spec = ClusterSpec({"worker": ["a:1", None]})

    assert spec.num_tasks("worker") == 2
    with pytest.raises(ClusterError, match="address of task 1 of 'worker' is not known"):
        spec.task_address("worker", 1)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_task_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(ClusterError, match=f"tasks 0 to 2, not task {index}"):
        ClusterSpec(CLUSTER).task_address("worker", index)


def test_a_job_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ClusterError, match=r"no job 'ps'.*'chief', 'worker'"):
        ClusterSpec(CLUSTER).num_tasks("ps")


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (None, "got None"),
        (["a:1"], "dictionary of addresses by job name"),
        ({"worker": "a:1"}, "got 'a:1'"),
        ({"worker": []}, r"at least one address.*got \[\]"),
        ({"worker": ["a"]}, "the address 'a'"),
        ({1: ["a:1"]}, "got 1"),
        ({"": ["a:1"]}, "got ''"),
        ({"worker": ["a:1", "b:1", "a:1"]}, "several tasks have a:1"),
        ({"chief": ["a:1"], "worker": ["a:1"]}, "several tasks have a:1"),
    ],
)
def test_what_is_no_cluster_is_refused(cluster: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        ClusterSpec(cluster)


@pytest.mark.parametrize("tasks", [{1: "a:1", 3: "b:1"}, {"1": "a:1", "3": "b:1"}], ids=repr)
def test_tasks_can_be_given_by_number(tasks: Any) -> None:
    spec = ClusterSpec({"worker": tasks})

    assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [1, 3])
    assert spec.task_address("worker", 3) == "b:1"
    assert spec.job_tasks("worker") == [None, "a:1", None, "b:1"]
    assert spec.as_dict() == {"worker": {1: "a:1", 3: "b:1"}}
    assert spec == ClusterSpec(spec)
    assert hash(spec) == hash(ClusterSpec(spec))
    with pytest.raises(ClusterError, match="the tasks 1, 3, not task 0"):
        spec.task_address("worker", 0)


def test_numbers_without_a_gap_are_a_list() -> None:
    spec = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}})

    assert spec == ClusterSpec({"worker": ["a:1", "b:1"]})
    assert spec.as_dict() == {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize("wrong", [{-1: "a:1"}, {"x": "a:1"}, {True: "a:1"}, {1.5: "a:1"}, {}])
def test_tasks_are_numbered_with_whole_numbers(wrong: Any) -> None:
    with pytest.raises(ClusterError, match="The tasks of the job 'worker'"):
        ClusterSpec({"worker": wrong})


def test_a_job_with_missing_tasks_does_not_train() -> None:
    spec = ClusterSpec({"worker": {1: "a:1"}})

    with pytest.raises(ClusterError, match="has only the tasks 1"):
        validate(spec, "worker", 1)


@pytest.mark.parametrize(
    ("spec", "task_type", "task_id", "message"),
    [
        (WORKERS, None, None, "task type is None and the task id None"),
        (WORKERS, "worker", None, "task id None"),
        (WORKERS, None, 0, "task type is None"),
        (ALONE, "worker", 0, "only the jobs none"),
        (WORKERS, "chief", 0, "is a 'chief', but the cluster has only the jobs worker"),
        (WORKERS, "captain", 0, "one of chief, worker, evaluator, ps; got 'captain'"),
        (WORKERS, "worker", 3, "numbered 0 to 2; this process is task 3"),
        # TensorFlow takes negative ids.
        (WORKERS, "worker", -1, "numbered 0 to 2; this process is task -1"),
        (WORKERS, "evaluator", 1, "numbered 0 to 0; this process is task 1"),
        (WORKERS, "worker", True, "whole number; got True"),
        (WORKERS, "worker", "0", "whole number; got '0'"),
        (ClusterSpec({"boss": ["a:1"]}), "boss", 0, "also has boss"),
        (ClusterSpec({"chief": ["a:1", "b:1"]}), "chief", 0, "at most one chief"),
        (ClusterSpec({"evaluator": ["a:1", "b:1"]}), "evaluator", 0, "at most one evaluator"),
    ],
)
def test_a_task_that_cannot_be_is_refused(
    spec: ClusterSpec, task_type: str | None, task_id: int | None, message: str
) -> None:
    for rule in (validate, rank_of):
        with pytest.raises(ClusterError, match=message):
            rule(spec, task_type, task_id)
