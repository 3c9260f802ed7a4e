"""`unisono launch` starts every task of a TF_CONFIG cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes.launched import MEETS, script
from processes.ports import free_ports
from processes.programs import (
    clean_environment,
    launcher,
    run,
)
from unisono.cluster import ClusterSpec
from unisono_tools.launching.local_tasks import local_tasks
from unisono_tools.launching.workers import _are_all

SHOWS = """
import json, os

task = json.loads(os.environ["TF_CONFIG"])["task"]
print(task["type"], task["index"])
"""


@pytest.mark.parametrize("source", ["environment", "file"])
def test_every_task_of_a_tf_config_cluster_is_started(tmp_path: Path, source: str) -> None:
    ports = iter(free_ports(3))
    cluster = {
        "worker": [f"127.0.0.1:{next(ports)}"],
        "chief": [f"localhost:{next(ports)}"],
        "evaluator": [f"localhost:{next(ports)}"],
    }
    text = json.dumps({"cluster": cluster})
    file = tmp_path / "cluster.json"
    file.write_text(text)
    environ = clean_environment(**({"TF_CONFIG": text} if source == "environment" else {}))
    option = ["--tf-config-cluster", str(file)] if source == "file" else []

    # Where the cluster comes from makes no difference to how its tasks meet.
    text = MEETS if source == "environment" else SHOWS

    status, output, errors = run(launcher(*option, script(tmp_path, text)), environ)

    assert status == 0, errors
    met = {"chief": " of 2 0", "evaluator": " of 1 0", "worker": " of 2 0"}
    names = ["chief 0", "evaluator 0", "worker 0"]
    ranks = names if source == "file" else ["chief 0", "evaluator 0", "worker 1"]
    assert sorted(output.splitlines()) == [
        f"[{name}] {rank}{met[name.split()[0]] if source == 'environment' else ''}"
        for name, rank in zip(names, ranks, strict=True)
    ]


def test_a_cluster_of_other_hosts_can_be_tried_on_this_one(tmp_path: Path) -> None:
    cluster = {"worker": ["far.invalid:1", "farther.invalid:1"]}
    environ = clean_environment(TF_CONFIG=json.dumps({"cluster": cluster}))

    status, output, errors = run(launcher("--all-local", script(tmp_path, MEETS)), environ)

    assert status == 0, errors
    assert sorted(output.splitlines()) == [f"[worker {r}] worker {r} of 2 0" for r in range(2)]


def test_a_task_sees_nothing_of_the_launcher_but_tf_config_and_a_token(tmp_path: Path) -> None:
    shows = "import os\nprint(sorted(name for name in os.environ if name in ('RANK', 'TF_CONFIG', "
    shows += "'WORLD_SIZE', 'MASTER_ADDR', 'TORCHELASTIC_RUN_ID', 'UNISONO_LAUNCH_PLAN')))"
    shows += "\nprint(len(os.environ['UNISONO_JOB_TOKEN']))"
    environ = clean_environment(TF_CONFIG='{"cluster": {"worker": ["localhost:1"]}}')

    _, output, _ = run(launcher(script(tmp_path, shows)), environ)

    assert output == "[worker 0] ['TF_CONFIG']\n[worker 0] 64\n"


@pytest.mark.parametrize(
    ("hosts", "all_are_here"),
    [(["localhost:1", "localhost:2"], True), (["localhost:1", "b:1"], False)],
)
def test_a_token_is_made_for_jobs_of_one_host(hosts: list[str], all_are_here: bool) -> None:
    tasks = local_tasks(ClusterSpec({"worker": hosts}), all_local=False)

    assert _are_all(tasks) is all_are_here
    assert _are_all([])
