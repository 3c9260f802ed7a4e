"""`unisono tune` on this host, among launched workers, and between hosts."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch._C._distributed_c10d import TCPStore

from processes.harness import run_ranks
from processes.namespaces import enter, make_hosts
from processes.ports import free_port
from processes.programs import clean_environment, run_together
from unisono.costs import Link, Tuning, read_tuning
from unisono.kernels import native_core
from unisono_tools.cli import main
from unisono_tools.tuning import (
    Measured,
    cluster_sweep,
    fitted,
    leave,
    predicted_seconds,
    rank_sweeps,
    runs_of,
)

INSIDE = {"inside"} if native_core().kernel is not None else set()


@pytest.mark.timeout(600)
def test_this_host_is_measured_and_what_changed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "tuning.json"
    alone = ["tune", "--quick", "--output", str(path), "-n", "1"]

    first = CliRunner().invoke(main, alone)
    between = Link(1e-4, 1e9, 1e-5)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "between": vars(between)}))
    second = CliRunner().invoke(main, [*alone[:-1], "2"])

    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert first.output.count("new") == 4
    assert f"Written to {path}." in second.output
    assert "UNISONO_TUNING=off is set" in second.output
    tuning = read_tuning(path)
    assert tuning.between == between
    assert second.output.count("kept") == 2
    assert tuning.loopback is not None
    assert (tuning.inside is not None) == bool(INSIDE)

    monkeypatch.setenv("UNISONO_TUNING", str(path))
    check_that_a_plan_compares(tuning)


def check_that_a_plan_compares(tuning: Tuning) -> None:
    cluster = ["--hosts", "2", "--gpus", "2", "--model-bytes", "1e6"]
    result = CliRunner().invoke(main, ["plan", *cluster, "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["constants"]["between"] == vars(tuning.between)
    rows = plan["measured"]
    assert {row["link"] for row in rows} == {"memory", "devices", "loopback", *INSIDE}
    for row in rows:
        one = Measured(*(row[field] for field in Measured._fields))
        predicted = row["predicted_seconds"]
        # All that runs on one host is predicted by what was measured there.
        if one.link != "inside":
            expected = predicted_seconds(one, getattr(tuning, one.link), tuning.sum_rate)
            assert predicted == pytest.approx(expected)
        assert row["error_percent"] == pytest.approx(100 * (predicted / one.seconds - 1))


def test_launched_workers_are_measured_by_rank_0(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    command = [sys.executable, "-m", "unisono", "tune", "--quick", "--output", str(path)]
    port = str(free_port())
    environments = [
        clean_environment(
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(2)
    ]

    (status, output, errors), (other_status, other_output, _) = run_together(command, environments)

    assert (status, other_status) == (0, 0), errors
    assert f"Written to {path}." in output
    assert other_output == ""
    assert read_tuning(path).loopback is not None


def in_namespaces(_: Any, rank: int, size: int, names: list[str]) -> list[Measured]:
    enter(names[rank * len(names) // size])
    limit = timedelta(seconds=30)
    store = TCPStore("10.83.0.1", 29400, None, rank == 0, limit, wait_for_workers=False)
    place = store, rank, size, [1 << 10, 1 << 14, 1 << 18], 0.02
    rows = list(rank_sweeps(*place))
    link = Link(1e-4, 1e9)
    tuning = Tuning(link, link, link, link, link, 1e10, {}, "today", "0", tcp=Link(1e-5, 1e9))
    rows += cluster_sweep(*place, tuning)
    leave(store, rank, size)
    return rows


def test_hosts_are_measured_by_their_first_ranks() -> None:
    with make_hosts(2) as hosts:
        hosts.slow_down("200mbit")
        first, second, third, fourth = run_ranks(4, in_namespaces, hosts.names, timeout=90)

    assert (
        {one.link for one in first}
        == {one.link for one in third}
        == {"loopback", "between", "tcp", *INSIDE}
    )
    # Those of all ranks, as they run where TCP is faster.
    assert (
        {one.link for one in second} == {one.link for one in fourth} == {"loopback", "tcp", *INSIDE}
    )
    run = runs_of(first)[-1]
    assert (run.num_hosts, run.ranks_per_host, len(run.times)) == (2, 2, 3)
    memory = [Measured("memory", 1, size, size / 1e10) for size in (1 << 10, 1 << 20)]
    rows = [one for one in first if one.link == "between"]
    copies = [one._replace(link="devices") for one in memory]
    assert fitted([*rows, *memory, *copies]).links["between"].bandwidth > 0
    # 25 MB/s, and what the switch lets through at once; a busy machine can only be slower.
    largest = max(rows, key=lambda one: one.num_bytes)
    assert largest.num_bytes / largest.seconds < 100e6
