"""Every benchmark that starts processes runs, and notices a wrong result."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes.programs import run

from unisono.kernels import native_core

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def rows_of(tmp_path: Path) -> Any:
    """Runs a benchmark, looks at its table and its picture, and returns its rows."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")

    def rows(name: str, *arguments: str) -> list[dict[str, Any]]:
        numbers, picture = tmp_path / "rows.json", tmp_path / "picture.png"
        outputs = ["--json", str(numbers), "--plot", str(picture)]
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments, *outputs]
        status, output, errors = run(command, timeout_seconds=110)
        assert status == 0, errors
        if output.startswith("Skipped: "):
            pytest.skip(output)
        assert native_core().status in output
        assert picture.stat().st_size > 1000
        found: list[dict[str, Any]] = json.loads(numbers.read_text())["rows"]
        return found

    return rows


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduce_on_one_host(rows_of: Any, ranks: int) -> None:
    sizes = ["--sizes", "4", "300004"]

    rows = rows_of("all_reduce", "--ranks", str(ranks), *sizes, "--seconds", "0.05")

    expected = [(size, memory) for size in (4, 300_004) for memory in ("plain", "in place")]
    assert [(row["bytes"], row["memory"]) for row in rows] == expected
    for row in rows:
        assert set(row["ratios"]) == {"Gloo", "DDP bucket", "floor"}
        bandwidth = row["bytes"] / row["latency_us"] / 1e3
        assert row["algorithm_gb_s"] == pytest.approx(bandwidth)
        assert row["bus_gb_s"] == pytest.approx(bandwidth * 2 * (ranks - 1) / ranks)


def test_all_reduce_between_hosts(rows_of: Any) -> None:
    arguments = ["--hosts", "2", "--rate", "1gbit", "--sizes", "64", "--seconds", "0.05"]

    rows = rows_of("all_reduce", "--bind", *arguments)

    assert [row["ranks"] for row in rows] == [4, 4]
    assert all(set(row["ratios"]) == {"Gloo", "DDP bucket"} for row in rows)


def test_all_reduce_beside_mpi(rows_of: Any) -> None:
    pytest.importorskip("mpi4py")
    mpi = ["--mpi", sys.executable, "--mpirun", "mpirun --oversubscribe --allow-run-as-root"]

    rows = rows_of("all_reduce", "--ranks", "2", "--sizes", "64", "--seconds", "0.05", *mpi)

    assert all("MPI" in row["ratios"] for row in rows)


def test_training_steps(rows_of: Any) -> None:
    rows = rows_of("training_step", "--quick", "--seconds", "0.1")

    assert [row["model"] for row in rows] == ["MLP 256", "Embedding"]
    assert all(set(row["ratios"]) == {"workers", "DDP", "limit"} for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "6"], "multiples of 4 bytes, got [6]"),
        (["--ranks", "1"], "2 or more"),
        (["--hosts", "2", "--ranks", "3"], "as many on each of 2 hosts, got [3]"),
        (["--rate", "1gbit"], "give --hosts 2"),
        (["--hosts", "2", "--mpi", "python"], "leave out --mpi or --hosts"),
    ],
)
def test_all_reduce_says_what_it_cannot_measure(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(BENCHMARKS)
    from all_reduce import parse

    with pytest.raises(SystemExit):
        parse(arguments)

    assert words in capsys.readouterr().err


@pytest.mark.parametrize("length", [1, 5, 65_521, 200_000])
@pytest.mark.parametrize("wrong", [False, True])
def test_one_wrong_element_is_noticed(
    monkeypatch: pytest.MonkeyPatch, length: int, wrong: bool
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from peers.turns import Competitor, sum_factor, take_turn

    data = np.zeros(length, np.float32)

    def reduce_alone() -> None:
        # As if another rank had brought twice the same.
        data[:] *= 3
        data[-1] += wrong

    competitor = Competitor(reduce_alone, data, sum_factor(2))
    expectation = pytest.raises(RuntimeError, match="should be") if wrong else nullcontext()
    with expectation:
        take_turn(competitor, 0, lambda: None, seed=7, calls=1)
