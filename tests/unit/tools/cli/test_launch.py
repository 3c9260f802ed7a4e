"""What the command refuses before it starts anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recorded_machines import on
from torch.distributed import DistNetworkError

from unisono_tools.cli import main
from unisono_tools.launching.workers import num_gpu_workers

CLUSTER = json.dumps({"cluster": {"worker": ["localhost:1", "localhost:2"]}})


@pytest.mark.parametrize(
    ("arguments", "tf_config", "message"),
    [
        (["--all-local", "-n", "2"], None, "a cluster in TF_CONFIG"),
        (["--all-local"], None, "a cluster in TF_CONFIG"),
        (["-n", "0"], None, "0 is not in the range x>=1"),
        (["-n", "2", "--nnodes", "2"], None, "need --rdzv-endpoint"),
        (["-n", "2", "--nnodes", "2", "--rdzv-endpoint", "here"], None, "the address 'here'"),
        (
            ["-n", "2", "--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "2"],
            None,
            "--node-rank 2 must be less than --nnodes 2",
        ),
        (["-n", "1", "--nnodes", "4:2"], None, "'4:2' is neither a number of hosts nor MIN:MAX"),
        (["-n", "1", "--nnodes", "some"], None, "'some' is neither"),
        (["-n", "1", "--nnodes", "1:4"], None, "need --rdzv-endpoint"),
        (
            ["-n", "1", "--nnodes", "1:4", "--rdzv-endpoint", "a:1", "--node-rank", "0"],
            None,
            "--node-rank needs a fixed number of hosts",
        ),
        (["-n", "1", "--rdzv-conf", "close"], None, "'close' has no value"),
        (["-n", "3"], CLUSTER, "2 tasks on this host, but -n asks for 3"),
        (["--nnodes", "2"], CLUSTER, "leave out --nnodes"),
        ([], "{", "TF_CONFIG is not JSON"),
        ([], "{}", "no cluster in TF_CONFIG"),
        ([], '{"cluster": {"worker": ["far.invalid:1"]}}', "No task of the cluster"),
        (["-n", "2", "nowhere.py"], None, "'nowhere.py' does not exist"),
    ],
)
def test_what_cannot_be_started_is_refused(
    arguments: list[str], tf_config: str | None, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('started')")

    result = CliRunner().invoke(
        main, ["launch", *arguments, str(script)], env={"TF_CONFIG": tf_config}
    )

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_hosts_that_cannot_connect_end_the_launcher_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*arguments: object) -> Any:
        def connect(*arguments: object) -> None:
            raise DistNetworkError("The client socket has timed out.\nframe #0: ...")

        return connect

    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr("unisono_tools.launching.workers.elastic_launch", unreachable)

    options = ["-n", "1", "--nnodes", "2", "--rdzv-endpoint", "node0:29400"]
    result = CliRunner().invoke(main, ["launch", *options, str(script)], env={"TF_CONFIG": None})

    assert result.exit_code == 1
    assert "The 2 hosts cannot reach each other at node0:29400" in result.output
    assert "frame" not in result.output


def test_a_module_is_run_as_python_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def keep(job: object, command: list[str]) -> int:
        commands.append(command)
        return 7

    monkeypatch.setattr("unisono_tools.launching.workers.run_workers", keep)

    result = CliRunner().invoke(main, ["launch", "-n", "2", "-m", "package.train", "-m", "x"])

    assert result.exit_code == 7
    assert commands == [[sys.executable, "-u", "-m", "package.train", "-m", "x"]]


@pytest.mark.parametrize(("machine", "expected"), [("one_gpu", 1), ("pcie_4", 4), ("dgx_1", 8)])
def test_every_gpu_has_a_worker(machine: str, expected: int) -> None:
    with on(machine):
        assert num_gpu_workers() == expected


def test_without_gpus_it_says_what_to_write(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('started')")

    with on("no_gpu"):
        result = CliRunner().invoke(main, ["launch", str(script)], env={"TF_CONFIG": None})

    assert result.exit_code == 2
    assert "torch sees no GPU on this host" in " ".join(result.output.split())
    assert "-n 4" in result.output
