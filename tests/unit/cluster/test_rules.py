from __future__ import annotations

import pytest

from unisono.cluster import ClusterSpec
from unisono.cluster.rules import (
    collective_leader,
    id_in_cluster,
    is_chief,
    validate,
    worker_count,
)
from unisono.errors import ClusterError

WORKERS = ClusterSpec({"worker": ["a:1", "b:1", "c:1"]})
CHIEF = ClusterSpec({"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]})
EVALUATOR = ClusterSpec({"worker": ["a:1", "b:1"], "evaluator": ["e:1"]})
ALONE = ClusterSpec({})


@pytest.mark.parametrize(
    ("spec", "task_type", "task_id", "chief", "count", "place", "leader"),
    [
        (ALONE, None, None, True, 1, 0, ""),
        (WORKERS, "worker", 0, True, 3, 0, "/job:worker/replica:0/task:0"),
        (WORKERS, "worker", 2, False, 3, 2, "/job:worker/replica:0/task:0"),
        (CHIEF, "chief", 0, True, 3, 0, "/job:chief/replica:0/task:0"),
        (CHIEF, "worker", 0, False, 3, 1, "/job:chief/replica:0/task:0"),
        (CHIEF, "worker", 1, False, 3, 2, "/job:chief/replica:0/task:0"),
        (EVALUATOR, "evaluator", 0, True, 1, 0, ""),
        (EVALUATOR, "worker", 1, False, 2, 1, "/job:worker/replica:0/task:0"),
        # TensorFlow counts evaluators in the spec, and fails with a KeyError here.
        (WORKERS, "evaluator", 0, True, 1, 0, ""),
    ],
)
def test_the_row_is_the_chief_and_then_the_workers(
    spec: ClusterSpec,
    task_type: str | None,
    task_id: int | None,
    chief: bool,
    count: int,
    place: int,
    leader: str,
) -> None:
    assert is_chief(spec, task_type, task_id) is chief
    assert worker_count(spec, task_type, task_id) == count
    assert id_in_cluster(spec, task_type, task_id) == place
    assert collective_leader(spec, task_type, task_id) == leader


def test_a_parameter_server_is_no_chief_and_no_worker() -> None:
    assert not is_chief(CHIEF, "ps", 0)
    for rule in (worker_count, id_in_cluster, collective_leader):
        with pytest.raises(ClusterError, match="'ps' takes no part"):
            rule(CHIEF, "ps", 0)


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
    for rule in (validate, is_chief, worker_count, id_in_cluster, collective_leader):
        with pytest.raises(ClusterError, match=message):
            rule(spec, task_type, task_id)
