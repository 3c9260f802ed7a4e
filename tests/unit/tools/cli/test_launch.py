"""What the command refuses before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from recorded_machines import on

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
        (["-n", "2", "--nnodes", "2", "--rdzv-endpoint", "here"], None, "got 'here'"),
        (
            ["-n", "2", "--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "2"],
            None,
            "--node-rank 2 must be less than --nnodes 2",
        ),
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
