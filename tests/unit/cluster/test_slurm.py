"""The variables are set by hand: no SLURM is needed here."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.cluster import Launch, Membership
from unisono.cluster.slurm import expand_counts, expand_hosts
from unisono.cluster.spec import derived_port
from unisono.cluster_resolver import SlurmClusterResolver
from unisono.errors import ClusterError

ENVIRON = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def test_the_task_is_found_with_its_neighbours() -> None:
    port = derived_port("slurm-42.1")

    found = SlurmClusterResolver(environ=ENVIRON)

    assert found.cluster_spec().job_tasks("worker") == [
        f"node08:{port}",
        f"node08:{port + 1}",
        f"node09:{port + 2}",
        f"node09:{port + 3}",
        f"node10:{port + 4}",
    ]
    assert (found.task_type, found.task_id) == ("worker", 3)
    assert found.environment == "slurm"
    assert found.launch() == Launch("slurm-42.1", local_rank=1, local_size=2)


def test_older_names_of_the_variables_are_read() -> None:
    environ = {
        "SLURM_JOBID": "42",
        "SLURM_STEPID": "1",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "5",
        "SLURM_NODELIST": "node[08-10]",
        "SLURM_TASKS_PER_NODE": "2(x2),1",
    }

    found = SlurmClusterResolver(environ=environ)

    assert found.cluster_spec() == SlurmClusterResolver(environ=ENVIRON).cluster_spec()


def test_the_step_counts_before_the_job() -> None:
    of_the_job = {"SLURM_JOB_NODELIST": "other[1-9]", "SLURM_TASKS_PER_NODE": "4(x9)"}
    of_the_job |= {"SLURM_STEP_NUM_TASKS": "5", "SLURM_NTASKS": "36"}

    found = SlurmClusterResolver(environ=ENVIRON | of_the_job)

    assert found.cluster_spec() == SlurmClusterResolver(environ=ENVIRON).cluster_spec()


def test_two_steps_of_a_job_get_two_ports() -> None:
    first, second = (
        SlurmClusterResolver(environ=ENVIRON | {"SLURM_STEP_ID": step}) for step in "12"
    )

    assert first.master("worker", 0) != second.master("worker", 0)


@pytest.mark.parametrize(
    ("others", "first"),
    [
        ({"MASTER_PORT": "7"}, "node08:7"),
        ({"MASTER_ADDR": "fast", "MASTER_PORT": "7"}, "fast:7"),
        ({"MASTER_ADDR": "fast", "UNISONO_COORDINATOR": "faster:8"}, "faster:8"),
    ],
)
def test_the_address_of_the_first_task_can_be_given(others: dict[str, str], first: str) -> None:
    assert SlurmClusterResolver(environ=ENVIRON | others).master("worker", 0) == first


def test_a_port_given_counts_before_the_environment() -> None:
    found = SlurmClusterResolver(port_base=9, environ=ENVIRON | {"MASTER_PORT": "7"})

    assert found.master("worker", 0) == "node08:9"


def test_tasks_of_a_host_have_neighbouring_ports_from_the_base_on() -> None:
    found = SlurmClusterResolver(port_base=8888, environ=ENVIRON)

    assert found.cluster_spec().job_tasks("worker") == [
        "node08:8888",
        "node08:8889",
        "node09:8888",
        "node09:8889",
        "node10:8888",
    ]


def test_tasks_are_given_to_jobs_in_the_order_of_their_names() -> None:
    found = SlurmClusterResolver({"worker": 4, "chief": 1}, 8888, rpc_layer="grpc", environ=ENVIRON)

    assert found.get_task_info() == ("worker", 2)
    assert found.cluster_spec().job_tasks("chief") == ["node08:8888"]
    assert found.master("worker", 0) == "grpc://node08:8889"
    assert found.master() == "grpc://node09:8889"


def test_jobs_must_have_all_tasks_and_known_names() -> None:
    with pytest.raises(ClusterError, match="`jobs` has 4 tasks, but 5 were started"):
        SlurmClusterResolver({"worker": 4}, environ=ENVIRON)
    with pytest.raises(ClusterError, match="also has trainer"):
        SlurmClusterResolver({"trainer": 5}, environ=ENVIRON)


@pytest.mark.parametrize("counts", [2, {"node08": 2, "node09": 2}])
def test_tasks_per_node_can_be_given(counts: Any) -> None:
    environ = ENVIRON | {
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NODELIST": "node[08-09]",
        "SLURM_STEP_TASKS_PER_NODE": "4",
    }

    found = SlurmClusterResolver(tasks_per_node=counts, port_base=1, environ=environ)

    assert found.cluster_spec().job_tasks("worker")[2] == "node09:1"


def test_tasks_per_node_must_fit_the_hosts() -> None:
    with pytest.raises(ClusterError, match="a number for each of the hosts node08, node09, node10"):
        SlurmClusterResolver(tasks_per_node={"node08": 5}, environ=ENVIRON)
    with pytest.raises(ClusterError, match=r"5 tasks.*tasks per node 2 \(`tasks_per_node`\)"):
        SlurmClusterResolver(tasks_per_node=2, environ=ENVIRON)


@pytest.mark.parametrize(
    ("arguments", "gpus", "num_gpus"),
    [
        ({"gpus_per_node": 4, "gpus_per_task": 2}, (2, 3), 2),
        ({"gpus_per_node": 4, "gpus_per_task": 1}, (1,), 1),
        ({"gpus_per_node": 4}, (2, 3), 2),
        ({"gpus_per_node": 4, "auto_set_gpu": False}, (0, 1), 2),
        ({"gpus_per_node": 0}, (), 0),
    ],
)
def test_the_tasks_of_a_host_share_its_gpus(
    arguments: dict[str, Any], gpus: tuple[int, ...], num_gpus: int
) -> None:
    found = SlurmClusterResolver(environ=ENVIRON, **arguments)

    assert found.launch().gpus == Membership.of(found).gpus == gpus
    assert found.num_accelerators() == {"GPU": num_gpus}


def test_more_gpus_than_a_host_has_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"2 tasks per host with 3 GPUs each .* the 4"):
        SlurmClusterResolver(gpus_per_node=4, gpus_per_task=3, environ=ENVIRON)


@pytest.mark.parametrize(
    "others",
    [{"SLURM_DISTRIBUTION": "cyclic"}, {"SLURM_DISTRIBUTION": "plane=2"}],
)
def test_where_tasks_are_dealt_in_turn_only_the_first_address_is_told(
    others: dict[str, str],
) -> None:
    found = SlurmClusterResolver(environ=ENVIRON | others)

    assert found.master("worker", 0) == f"node08:{derived_port('slurm-42.1')}"
    assert found.cluster_spec().job_tasks("worker")[1:] == [None] * 4


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("SLURM_PROCID", "SLURM_PROCID"),
        ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS or SLURM_NTASKS"),
        ("SLURM_JOB_ID", "SLURM_JOB_ID or SLURM_JOBID"),
        ("SLURM_STEP_NODELIST", "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST or SLURM_NODELIST"),
    ],
)
def test_a_variable_that_is_missing_is_named(name: str, shown: str) -> None:
    environ = {key: value for key, value in ENVIRON.items() if key != name}

    with pytest.raises(ClusterError, match=f"srun sets {shown}, but it is missing"):
        SlurmClusterResolver(environ=environ)


@pytest.mark.parametrize(
    "others",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        {"SLURM_STEP_NODELIST": "node[08-09]"},
    ],
)
def test_counts_that_do_not_go_together_are_refused(others: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match=r"contradict each other: 5 tasks.*the hosts node08"):
        SlurmClusterResolver(environ=ENVIRON | others)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1.c", ["a", "b-1.c"]),
        ("host[01-03,7],other", ["host01", "host02", "host03", "host7", "other"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]x", ["n098x", "n099x", "n100x", "n101x"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("x,r[1]n[2-3],y[1-2]", ["x", "r1n2", "r1n3", "y1", "y2"]),
    ],
)
def test_a_list_of_hosts_is_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,", ",a", "a[1", "a1]", "a[]", "a[x]", "a[1-]", "a[3-1]"])
def test_a_list_of_hosts_that_cannot_be_read_is_shown(text: str) -> None:
    with pytest.raises(ClusterError) as caught:
        expand_hosts(text)

    assert f"the list of hosts {text!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,12(x2)", [1, 12, 12])]
)
def test_counts_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "2,,1", "-1"])
def test_counts_that_cannot_be_read_are_shown(text: str) -> None:
    with pytest.raises(ClusterError) as caught:
        expand_counts(text)

    assert f"the tasks per node {text!r}" in str(caught.value)
