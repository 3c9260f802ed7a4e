from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from unisono.cluster import (
    Address,
    ClusterSpec,
    Membership,
    SimpleClusterResolver,
    TorchrunClusterResolver,
)
from unisono.errors import ClusterError

CLUSTER = {"worker": ["a:1", "b:2", "a:3"], "chief": ["c:4"], "evaluator": ["e:5"]}
WORKERS = ClusterSpec({"worker": ["a:1", "b:1", "c:1"]})
CHIEF = ClusterSpec({"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]})
EVALUATOR = ClusterSpec({"worker": ["a:1", "b:1"], "evaluator": ["e:1"]})
ALONE = ClusterSpec({})


def membership(task_type: str, task_id: int) -> Membership:
    return Membership.of(SimpleClusterResolver(CLUSTER, task_type=task_type, task_id=task_id))


def test_all_tasks_of_a_row_see_the_same_job_and_different_ranks() -> None:
    row = [membership("chief", 0), *(membership("worker", index) for index in range(3))]

    assert [one.rank for one in row] == [0, 1, 2, 3]
    assert [one.is_chief for one in row] == [True, False, False, False]
    assert {one.size for one in row} == {4}
    assert {one.coordinator for one in row} == {Address("c", 4)}
    assert len({one.job for one in row}) == 1


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
    found = Membership.of(SimpleClusterResolver(spec, task_type=task_type, task_id=task_id))

    assert (found.is_chief, found.size, found.rank) == (chief, count, place)
    assert found.leader == leader


def test_tasks_at_one_host_are_neighbours() -> None:
    places = [membership("worker", index) for index in range(3)]

    assert [(one.local_rank, one.local_size) for one in places] == [(0, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize("in_the_spec", [True, False])
def test_an_evaluator_is_alone_and_chief(in_the_spec: bool) -> None:
    cluster = {job: CLUSTER[job] for job in CLUSTER if in_the_spec or job != "evaluator"}

    one = Membership.of(SimpleClusterResolver(cluster, task_type="evaluator", task_id=0))

    assert (one.rank, one.size, one.is_chief) == (0, 1, True)
    assert one.coordinator == Address("", 0)


def test_without_a_cluster_a_process_is_alone() -> None:
    one = Membership.of(SimpleClusterResolver({}))

    assert (one.rank, one.size, one.is_chief, one.uses_existing_store) == (0, 1, True, False)


def test_another_cluster_is_another_job() -> None:
    other = Membership.of(SimpleClusterResolver({"worker": ["a:1"]}, task_type="worker", task_id=0))

    assert other.job != membership("worker", 0).job


def test_what_torchrun_says_is_kept() -> None:
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "abc",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    one = Membership.of(TorchrunClusterResolver(environ=environ))

    assert (one.rank, one.size, one.local_rank, one.local_size) == (5, 8, 1, 4)
    assert one.coordinator == Address("::1", 29500)
    assert (one.restart_count, one.uses_existing_store) == (3, True)
    assert one.job == "torchrun-abc@[::1]:29500"


def test_a_cluster_without_a_task_is_refused() -> None:
    with pytest.raises(ClusterError, match="must know which task it is"):
        Membership.of(SimpleClusterResolver(CLUSTER))


def test_a_parameter_server_is_refused() -> None:
    resolver = SimpleClusterResolver({"ps": ["a:1"]}, task_type="ps", task_id=0)

    with pytest.raises(ClusterError, match="'ps' takes no part"):
        Membership.of(resolver)


def test_a_first_worker_at_an_unknown_address_is_refused() -> None:
    resolver = SimpleClusterResolver({"worker": [None, "b:1"]}, task_type="worker", task_id=1)

    with pytest.raises(ClusterError, match="address of task 0 of 'worker' is not known"):
        Membership.of(resolver)


def test_a_membership_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        membership("worker", 0).rank = 1  # type: ignore[misc]
