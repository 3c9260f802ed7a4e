"""`unisono trace` writes a timeline and prints where the steps went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from trace_events import check_trace_events

import unisono as uo
from unisono.tracing.lock_waits import can_measure
from unisono_tools.cli.main import main


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "recorded"
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    with uo.tracing.record(folder):
        strategy.run(lambda: torch.ones(2) + 1)
    strategy.close()
    return folder


def trace(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def test_the_timeline_is_written_beside_the_files(recorded: Path) -> None:
    result = trace(recorded)

    assert result.exit_code == 0, result.output
    assert "Where did the step go: 1 step, 2 replicas, 1 worker" in result.output
    assert "Straggler:" in result.output
    assert ("Waiting for the interpreter: " in result.output) is can_measure()
    table = [line for line in result.output.splitlines() if line.startswith(("replica", " "))]
    assert max(map(len, table)) <= 80
    check_trace_events(json.loads((recorded / "timeline.json").read_text()))


def test_the_timeline_is_written_where_it_is_wanted(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.json"

    result = trace(recorded, "--output", path)

    assert result.exit_code == 0, result.output
    check_trace_events(json.loads(path.read_text()))
    assert not (recorded / "timeline.json").exists()


def test_the_summary_alone_is_json_if_asked_for(recorded: Path) -> None:
    result = trace(recorded, "--summary", "--json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["num_steps"] == 1
    assert set(found["replicas"]) == {"0", "1"}
    for shares in [*found["replicas"].values(), found["total"]]:
        # Every number says what it counts.
        assert all(name.endswith("_seconds") for name in shares)
        assert 0 <= shares["compute_seconds"] < 60
    assert [path.name for path in recorded.iterdir()] == ["worker-0.jsonl"]


def test_a_worker_without_a_file_is_named(recorded: Path) -> None:
    path = recorded / "worker-0.jsonl"
    path.write_text(path.read_text().replace('"size": 1', '"size": 3'))

    assert "There is no file of worker 1, 2." in trace(recorded, "--summary").output


def test_a_folder_without_a_trace_is_an_error(tmp_path: Path) -> None:
    result = trace(tmp_path)

    assert result.exit_code == 1
    assert "There is no trace in" in result.output


def test_a_run_without_a_step_has_a_timeline_and_no_summary(tmp_path: Path) -> None:
    with uo.tracing.record(tmp_path), uo.tracing.span("compute", "preparation"):
        pass

    whole, alone = trace(tmp_path), trace(tmp_path, "--summary")

    assert whole.exit_code == 0, whole.output
    assert "There is no summary. The trace holds no step" in whole.output
    check_trace_events(json.loads((tmp_path / "timeline.json").read_text()))
    assert alone.exit_code == 1
    assert "Error: The trace holds no step" in alone.output


def test_an_output_in_no_folder_is_an_error(recorded: Path, tmp_path: Path) -> None:
    result = trace(recorded, "--output", tmp_path / "nowhere" / "a.json")

    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_an_output_without_a_timeline_is_an_error(recorded: Path, tmp_path: Path) -> None:
    result = trace(recorded, "--summary", "--output", tmp_path / "a.json")

    assert result.exit_code == 2
    assert "leave out --output" in result.output
