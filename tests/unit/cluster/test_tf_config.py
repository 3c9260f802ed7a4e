from __future__ import annotations

import json
from typing import Any

import pytest

from unisono.cluster_resolver import TFConfigClusterResolver
from unisono.errors import ClusterError

CLUSTER = {"worker": ["a:1", "b:1"]}


def resolver(config: Any, **arguments: Any) -> TFConfigClusterResolver:
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigClusterResolver(environ={"TF_CONFIG": text}, **arguments)


@pytest.mark.parametrize("index", [1, "1"])
def test_the_cluster_and_the_task_are_read(index: object) -> None:
    found = resolver({"cluster": CLUSTER, "task": {"type": "worker", "index": index}})

    assert found.cluster_spec().as_dict() == CLUSTER
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert (found.rpc_layer, found.environment) == (None, "")
    assert found.master() == "b:1"
    assert found.master("worker", 0) == "a:1"
    assert found.master("worker", 0, rpc_layer="grpc") == "grpc://a:1"


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}])
def test_without_a_cluster_the_process_is_alone(environ: dict[str, str]) -> None:
    found = TFConfigClusterResolver(environ=environ)

    assert not found.cluster_spec()
    assert (found.task_type, found.task_id, found.master()) == (None, None, "")


def test_a_task_without_a_cluster_is_alone() -> None:
    found = resolver({"task": {"type": "worker", "index": 0}})

    assert not found.cluster_spec()
    assert found.task_type is None


def test_arguments_count_instead_of_the_environment() -> None:
    config = {
        "cluster": CLUSTER,
        "task": {"type": "worker", "index": 0},
        "rpc_layer": "grpc",
        "environment": "cloud",
    }

    plain = resolver(config)
    other = resolver(config, task_type="evaluator", task_id=0, rpc_layer="http", environment="lab")

    assert (plain.rpc_layer, plain.environment) == ("grpc", "cloud")
    assert plain.master() == "grpc://a:1"
    assert (other.task_type, other.task_id) == ("evaluator", 0)
    assert (other.rpc_layer, other.environment) == ("http", "lab")


def test_attributes_that_are_set_count_instead_of_the_environment() -> None:
    found = resolver({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}})

    found.task_id = 1
    found.rpc_layer = "grpc"

    assert found.master() == "grpc://b:1"


def test_a_session_master_comes_first() -> None:
    config = {"cluster": CLUSTER, "task": {"type": "worker", "index": 0}, "session_master": "s:1"}

    assert resolver(config).master() == "s:1"


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    assert TFConfigClusterResolver().task_id == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{cluster", "TF_CONFIG is not JSON.*Found '{cluster'"),
        ("[1]", r"TF_CONFIG must be a JSON object.*found \[1\]"),
        ({"cluster": ["a:1"]}, r"`cluster` in TF_CONFIG must be an object.*found \['a:1'\]"),
        ({"cluster": CLUSTER, "task": "worker"}, "`task` in TF_CONFIG.*found 'worker'"),
        ({"cluster": CLUSTER}, "TF_CONFIG.*task type is None and the task id None"),
        ({"cluster": CLUSTER, "task": {"type": "worker"}}, "TF_CONFIG.*task id None"),
        ({"cluster": CLUSTER, "task": {"type": 1, "index": 0}}, "`type` in TF_CONFIG.*found 1"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": "x"}}, "`index`.*found 'x'"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": 1.5}}, "`index`.*found 1.5"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": True}}, "`index`.*found True"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": 2}}, "TF_CONFIG.*task 2"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": -1}}, "TF_CONFIG.*task -1"),
        ({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}}, "TF_CONFIG.*'chief'"),
        ({"cluster": {"worker": ["a"]}}, "address 'a'"),
        ({"rpc_layer": 1}, "`rpc_layer` in TF_CONFIG must be a string; found 1"),
    ],
)
def test_a_wrong_tf_config_is_refused_with_what_was_found(config: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        resolver(config)
