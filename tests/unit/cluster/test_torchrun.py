from __future__ import annotations

import pytest

from unisono.cluster import Launch
from unisono.cluster_resolver import TorchrunClusterResolver
from unisono.errors import ClusterError

# What torchrun 2.13 sets for worker 1 of 3.
ENVIRON = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_the_worker_is_found_with_what_the_agent_says() -> None:
    found = TorchrunClusterResolver(environ=ENVIRON)

    assert found.cluster_spec().job_tasks("worker") == ["127.0.0.1:29500", None, None]
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert found.environment == "torchrun"
    assert found.launch() == Launch(
        job="torchrun-none@127.0.0.1:29500",
        local_rank=1,
        local_size=3,
        restart_count=2,
        uses_existing_store=True,
    )


def test_variables_set_by_hand_are_enough() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}

    found = TorchrunClusterResolver(environ=environ)

    assert found.cluster_spec().job_tasks("worker") == ["[::1]:1"]
    assert found.launch() == Launch(job="torchrun-none@[::1]:1")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"])
@pytest.mark.parametrize(("text", "state"), [(None, "missing"), ("", "empty")])
def test_a_variable_that_is_not_set_is_named(name: str, text: str | None, state: str) -> None:
    environ = {key: value for key, value in ENVIRON.items() if key != name}
    environ |= {} if text is None else {name: text}

    with pytest.raises(ClusterError, match=f"torchrun sets {name}, but it is {state} here"):
        TorchrunClusterResolver(environ=environ)


def test_what_is_there_is_shown_beside_what_is_missing() -> None:
    with pytest.raises(ClusterError, match="found RANK='1', WORLD_SIZE='3'"):
        TorchrunClusterResolver(environ={"RANK": "1", "WORLD_SIZE": "3"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["x", "-1", "1.5", "²"])
def test_a_variable_that_is_no_number_is_named_with_what_was_found(name: str, text: str) -> None:
    with pytest.raises(ClusterError, match=f"{name} must be a whole number.*found '{text}'"):
        TorchrunClusterResolver(environ=ENVIRON | {name: text})


@pytest.mark.parametrize(("rank", "size"), [("3", "3"), ("0", "0")])
def test_a_rank_beyond_the_world_is_refused(rank: str, size: str) -> None:
    with pytest.raises(ClusterError, match=f"less than WORLD_SIZE; found {rank} of {size}"):
        TorchrunClusterResolver(environ=ENVIRON | {"RANK": rank, "WORLD_SIZE": size})


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_that_cannot_be_is_refused(port: str) -> None:
    with pytest.raises(ClusterError, match=f"'127.0.0.1:{port}'"):
        TorchrunClusterResolver(environ=ENVIRON | {"MASTER_PORT": port})
