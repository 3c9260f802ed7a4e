from __future__ import annotations

import json
import socket

import pytest

from unisono.cluster import ClusterSpec
from unisono.errors import ClusterError
from unisono_tools.launching.local_tasks import is_of_this_host, local_tasks
from unisono_tools.processes import free_ports


def test_only_the_tasks_of_this_host_are_started() -> None:
    cluster = {"worker": ["localhost:1", "far.invalid:1", "127.0.0.1:2"]}
    spec = ClusterSpec(cluster)

    tasks = local_tasks(spec, all_local=False)

    assert [task.name for task in tasks] == ["worker 0", "worker 2"]
    assert json.loads(tasks[1].tf_config) == {
        "cluster": cluster,
        "task": {"type": "worker", "index": 2},
    }


def test_all_tasks_can_be_moved_here() -> None:
    spec = ClusterSpec({"chief": ["far.invalid:1"], "worker": ["far.invalid:2", "near.invalid:2"]})

    tasks = local_tasks(spec, all_local=True)

    assert [task.name for task in tasks] == ["chief 0", "worker 0", "worker 1"]
    (cluster,) = {json.dumps(json.loads(task.tf_config)["cluster"]) for task in tasks}
    addresses = [address for job in json.loads(cluster).values() for address in job]
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_a_cluster_without_a_task_here_is_refused_with_its_addresses() -> None:
    with pytest.raises(ClusterError, match=r"No task .*far.invalid:1.*--all-local"):
        local_tasks(ClusterSpec({"worker": ["far.invalid:1"]}), all_local=False)


def test_no_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="no cluster in TF_CONFIG"):
        local_tasks(ClusterSpec({}), all_local=False)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", socket.gethostname()])
def test_names_of_this_host_are_known(host: str) -> None:
    assert is_of_this_host(host)


# The second is set aside for documentation.
@pytest.mark.parametrize("host", ["far.invalid", "192.0.2.1"])
def test_other_hosts_are_others(host: str) -> None:
    assert not is_of_this_host(host)


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(5)

    assert len(set(ports)) == 5
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()
