"""What `unisono plan` predicts, from which constants, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from unisono.costs import Cluster, Link, Tuning
from unisono_tools.cli import main
from unisono_tools.pricing import phases_of, seconds_of

CLUSTER = ["--hosts", "512", "--gpus", "8", "--model-bytes", "28e9"]
LINKS = ["--latency", "1e-5", "--bandwidth", "1e10"]
INSIDE = ["--inside-latency", "1e-6", "--inside-bandwidth", "1e11", "--memory-rate", "1e12"]


def planned(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def test_each_algorithm_has_its_cost_on_thousands_of_ranks() -> None:
    plan = planned(*CLUSTER, *LINKS, *INSIDE)

    cluster = Cluster(512, 8, Link(1e-6, 1e11), Link(1e-5, 1e10), 1e12)
    expected = {
        name: seconds_of(phases_of(name, 512, 8), cluster, 28e9)
        for name in ("ring", "exchange", "halving", "parts", "leaders", "tree")
    }
    found = {row["algorithm"]: row["seconds"] for row in plan["algorithms"]}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert list(found.values()) == sorted(found.values())
    assert set(plan["constants"]["sources"].values()) == {"given"}
    assert "measured" not in plan


def test_crossovers_are_where_the_fastest_changes() -> None:
    plan = planned(*CLUSTER, *LINKS, *INSIDE)
    cluster = Cluster(512, 8, Link(1e-6, 1e11), Link(1e-5, 1e10), 1e12)

    assert plan["crossovers"]
    for row in plan["crossovers"]:
        before, after = (phases_of(row[name], 512, 8) for name in ("fastest_before", "to"))
        for factor, is_over in ((0.9, False), (1.1, True)):
            size = row["num_bytes"] * factor
            is_faster = seconds_of(after, cluster, size) < seconds_of(before, cluster, size)
            assert is_faster == is_over


def test_constants_are_those_given_then_those_of_the_file_then_assumed(tmp_path: Path) -> None:
    link = Link(7e-6, 3e9, 2e-6)
    elsewhere = Tuning(link, link, link, None, None, 3e9, {"cpu": "another"}, "today", "0")
    (tmp_path / "other.json").write_text(elsewhere.to_text())

    plan = planned(*CLUSTER, "--tuning", str(tmp_path / "other.json"), "--inside-bandwidth", "5e9")

    assert plan["constants"]["inside"] == {"latency": 7e-6, "bandwidth": 5e9, "overhead": 2e-6}
    assert plan["constants"]["memory_rate"] == 3e9
    assert plan["constants"]["sources"] == {
        "inside_latency": "tuned",
        "inside_bandwidth": "given",
        "latency": "assumed",
        "bandwidth": "assumed",
        "memory_rate": "tuned",
    }


def test_sizes_are_read_and_printed_in_powers_of_1024() -> None:
    sizes = ["--model-bytes", "28G"]

    plan = planned(*CLUSTER[:4], *sizes)
    shown = CliRunner().invoke(main, ["plan", *CLUSTER[:4], *sizes]).output

    assert plan["model_bytes"] == 28 * 2**30
    assert "All-reduce of 28 GiB on 512 x 8 ranks" in shown
    assert "50 GB/s (assumed)" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("shape", [("1", "8"), ("3", "1"), ("2", "6")])
def test_odd_clusters_have_a_table_and_a_picture(shape: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    arguments = ["--hosts", shape[0], "--gpus", shape[1], "--model-bytes", "1000"]

    result = CliRunner().invoke(main, ["plan", *arguments, "--plot", str(picture)])

    assert result.exit_code == 0, result.output
    assert "ring" in result.output
    assert "Unisono runs" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0", "--gpus", "8", "--model-bytes", "1"], "0 is not in the range x>=1"),
        (["--hosts", "1", "--gpus", "1", "--model-bytes", "1"], "does not communicate"),
        (["--hosts", "1", "--gpus", "2", "--model-bytes", "0"], "'0' is not a size"),
        ([*CLUSTER, "--measure"], "run `unisono tune` first"),
        ([*CLUSTER, "--bandwidth", "0"], "--bandwidth"),
        ([*CLUSTER, "--tuning", "nowhere.json"], "'nowhere.json' does not exist"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["plan", *arguments])

    assert result.exit_code != 0
    assert message in result.output


def test_a_file_that_is_no_tuning_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")

    result = CliRunner().invoke(main, ["plan", *CLUSTER, "--tuning", str(tmp_path / "other.json")])

    assert result.exit_code == 1
    assert "is not a tuning file" in result.output
