"""Every benchmark that starts processes runs, and notices a wrong result."""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from processes.programs import run

from unisono.kernels import native_core
from unisono_tools.benchmarks import BenchmarkError, Row
from unisono_tools.benchmarks.all_reduce import AllReduceSweep
from unisono_tools.benchmarks.peers.turns import Competitor, sum_factor, take_turn
from unisono_tools.benchmarks.reduce import BATCHES, SIZES, ReduceSweep, check
from unisono_tools.benchmarks.rows import spell_bytes
from unisono_tools.benchmarks.training_step import check_losses
from unisono_tools.cli import main
from unisono_tools.cli.bench import bench

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
UNISONO = [sys.executable, "-m", "unisono"]


@pytest.fixture
def rows_of(tmp_path: Path) -> Any:
    """Runs a benchmark, looks at its table and its picture, and returns its rows."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")

    def rows(name: str, *arguments: str) -> list[dict[str, Any]]:
        numbers, picture = tmp_path / "rows.json", tmp_path / "picture.png"
        outputs = ["--json", str(numbers), "--plot", str(picture)]
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments, *outputs]
        status, output, errors = run(command, timeout_seconds=250)
        if status == 3:
            pytest.skip(errors)
        assert status == 0, errors
        # What torch's C++ code logs.
        assert "[c10d]" not in errors
        found: list[dict[str, Any]] = json.loads(numbers.read_text())["rows"]
        header = ["min", "p50", "p99", "max", *found[0]["rates"], *found[0]["ratios"]]
        assert all(name in output for name in header)
        assert max(map(len, output.splitlines())) <= 80
        assert native_core().status in " ".join(output.split())
        assert picture.stat().st_size > 1000
        return found

    return rows


def test_reductions(rows_of: Any) -> None:
    rows = rows_of("reduce", "--sizes", "4", "300004", "--replicas", "3", "--seconds", "0")

    cases = ["4 B", "292.973 KB"]
    assert [(row["case"], row["into"]) for row in rows] == [
        (case, into) for case in cases for into in ("one", "all")
    ]
    for row in rows:
        least, median, high, most = row["seconds"].values()
        assert least <= median <= high <= most
        moved = row["bytes"] * (4 if row["into"] == "one" else 6)
        assert row["rates"]["GB/s"] == pytest.approx(moved / median / 1e9)
        assert row["ratios"].keys() >= {"add chain", "foreach", "limit"}


@pytest.mark.parametrize(
    ("sizes", "batches", "expected"),
    [
        ((), False, (SIZES, tuple(BATCHES))),
        ((4,), False, ((4,), ())),
        ((), True, ((), tuple(BATCHES))),
        ((4,), True, ((4,), tuple(BATCHES))),
    ],
)
def test_sizes_and_batches_can_be_measured_alone(
    sizes: tuple[int, ...], batches: bool, expected: tuple[Any, ...]
) -> None:
    command = bench.commands["reduce"].callback
    assert command is not None
    make_sweep = inspect.unwrap(command)

    sweep = make_sweep(
        quick=False, sizes=sizes, batches=batches, replicas=(), seconds=0, tensorflow=None
    )

    assert (sweep.sizes, sweep.batches) == expected


def test_all_reduce_on_one_host(rows_of: Any) -> None:
    ranks, sizes = 3, ["--sizes", "4", "300004"]

    rows = rows_of("all_reduce", "--ranks", str(ranks), *sizes, "--seconds", "0.05")

    expected = [(size, memory) for size in (4, 300_004) for memory in ("plain", "in place")]
    assert [(row["bytes"], row["memory"]) for row in rows] == expected
    for row in rows:
        assert set(row["ratios"]) == {"Gloo", "DDP bucket", "floor"}
        bandwidth = row["bytes"] / row["seconds"]["p50"] / 1e9
        assert row["rates"]["GB/s"] == pytest.approx(bandwidth)
        assert row["rates"]["bus GB/s"] == pytest.approx(bandwidth * 2 * (ranks - 1) / ranks)


def test_all_reduce_between_hosts(rows_of: Any) -> None:
    arguments = ["--hosts", "2", "--rate", "1gbit", "--sizes", "64", "--seconds", "0.05"]

    rows = rows_of("all_reduce", "--bind", *arguments)

    has_mpi = find_spec("mpi4py") is not None
    assert [row["ranks"] for row in rows] == [4] * (6 if has_mpi else 4)
    assert all(set(row["ratios"]) >= {"Gloo", "DDP bucket"} for row in rows)
    assert all(("flat MPI" in row["ratios"]) is has_mpi for row in rows)


def test_the_table_between_hosts_has_every_engine_as_many_times_as_fast_as_gloo() -> None:
    memories = [
        f"{where}{engine}" for engine in ("", ", TCP", ", MPI") for where in ("plain", "in place")
    ]
    sweep = AllReduceSweep(sizes=(64, 1 << 20), hosts=2, mpi="python")
    rows = [
        Row({"memory": memory}, size, [1.0], {}, {"Gloo": 3.0 + number, "flat MPI": 2.0})
        for size in sweep.sizes
        for number, memory in enumerate(memories)
    ]

    *_, head, _, small, large = sweep.summary(rows).splitlines()

    engines = [
        f"{engine}, {where}" for engine in ("Gloo", "TCP", "MPI") for where in ("plain", "in place")
    ]
    assert head == f"| size | {' | '.join(engines)} | flat MPI |"
    assert small == "| 64 B | 3 | 4 | 5 | 6 | 7 | 8 | 1.5 |"
    assert large.startswith("| 1 MB | 3 | ")
    assert AllReduceSweep().summary(rows) == ""


def test_all_reduce_beside_mpi(rows_of: Any) -> None:
    pytest.importorskip("mpi4py")
    mpi = ["--mpi", sys.executable, "--mpirun", "mpirun --oversubscribe --allow-run-as-root"]

    rows = rows_of("all_reduce", "--ranks", "2", "--sizes", "64", "--seconds", "0.05", *mpi)

    assert all("flat MPI" in row["ratios"] for row in rows)


@pytest.mark.backend
def test_training_steps(rows_of: Any) -> None:
    rows = rows_of("training_step", "--quick", "--seconds", "0.1", "--replicas", "2")

    assert [(row["model"], row["batch"]) for row in rows] == [
        ("MLP 256", "2 x 32"),
        ("Embedding", "2 x 64"),
    ]
    peers = {"captured", "workers", "DDP", "DDP uo", "limit"}
    assert all(set(row["ratios"]) == peers for row in rows)


@pytest.mark.parametrize(
    ("replicas", "expected", "num_measurements"), [((), (2,), 6), ((1, 4, 8), (1, 4, 8), 18)]
)
def test_training_steps_are_measured_with_each_number_of_replicas(
    replicas: tuple[int, ...], expected: tuple[int, ...], num_measurements: int
) -> None:
    command = bench.commands["step"].callback
    assert command is not None

    sweep = inspect.unwrap(command)(quick=False, seconds=0, tensorflow=None, replicas=replicas)

    assert (sweep.replicas, sweep.num_measurements) == (expected, num_measurements)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("all-reduce --sizes 6", "multiples of 4 bytes, got [6]"),
        ("all-reduce --sizes 4 6K 4X", "'4X' is not a size"),
        ("all-reduce --ranks 1", "2 or more"),
        ("all-reduce --hosts 2 --ranks 3", "the same number on each of 2 hosts, got [3]"),
        ("all-reduce --rate 1gbit", "give --hosts 2"),
        ("reduce --replicas 2 1", "2 or more, got [2, 1]"),
        ("step --replicas 2 0", "1 or more, got [2, 0]"),
        ("step --plot nowhere/out.png", "the folder 'nowhere' does not exist"),
        ("step --plot out.txt", "must end in .png or .svg or .pdf"),
        ("step --quik", "--quick"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(arguments: str, words: str) -> None:
    pytest.importorskip("rich")

    result = CliRunner().invoke(main, ["bench", *arguments.split()])

    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("bench step", "rich", "bench"),
        ("bench step --plot out.png", "matplotlib", "bench"),
        ("demo", "sklearn", "demo"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, words: str, package: str, extra: str
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setitem(sys.modules, package, None)

    result = CliRunner().invoke(main, words.split())

    assert result.exit_code == 3
    (line,) = result.output.splitlines()
    assert package in line
    assert f"pip install 'unisono[{extra}]'" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("reduce --sizes 4 --seconds 0 --tensorflow false", "TensorFlow ended with status 1"),
        ("reduce --tensorflow /nowhere/python", "/nowhere/python cannot be started"),
        ("all-reduce --ranks 2 --mpi python --mpirun false", "0 of 2 MPI processes started"),
    ],
)
def test_a_competitor_that_fails_ends_the_run_with_status_1(arguments: str, words: str) -> None:
    pytest.importorskip("rich")

    result = CliRunner().invoke(main, ["bench", *arguments.split()])

    assert result.exit_code == 1
    assert words in result.output


def made_rows(into: str = "one") -> list[Row]:
    """Rows as long as they get: six competitors, slow and fast."""
    names = ["stack.sum", "add chain", "foreach", "limit", "TF eager", "TF graph"]
    return [
        Row(
            {"case": spell_bytes(size), "replicas": 2, "into": into},
            size,
            [number * size * 1e-9 for number in range(1, 100)],
            {"GB/s": 12.34, "bus GB/s": 0.567},
            {name: 0.37 + 0.8 * place for place, name in enumerate(names)},
        )
        for size in SIZES
    ]


def test_a_table_fits_80_columns_and_has_every_number() -> None:
    report = pytest.importorskip("unisono_tools.benchmarks.report", exc_type=ImportError)
    output = io.StringIO()
    console = pytest.importorskip("rich.console").Console(file=output, width=80)

    report.print_table(ReduceSweep(), made_rows(), console)

    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = output.getvalue().split()
    for name in ("min", "p50", "p99", "max", "foreach", "limit"):
        assert words.count(name) == 1
    # Each table repeats what was measured.
    assert words.count("replicas") == output.getvalue().count("case") > 1
    assert words.count("12.3") == words.count("0.567") == words.count("4.37") == len(SIZES)


def test_the_picture_of_reductions_has_sizes_and_speeds_as_people_say_them() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()

    ReduceSweep(replicas=(2,)).draw(figure, [*made_rows("one"), *made_rows("all")])

    for axis in figure.axes:
        sizes = [label.get_text() for label in axis.get_xticklabels()]
        assert 3 <= len(sizes) <= 7
        assert all(re.fullmatch(r"\d+ (B|KB|MB)", size) for size in sizes)
    speeds = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert speeds == ["0.5x", "1x", "2x"]
    assert "times faster" not in figure.axes[0].get_ylabel()


def test_the_picture_of_all_reduces_has_a_panel_per_number_of_ranks() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    rows = [
        Row({"ranks": ranks, "memory": memory}, size, [size / 1e9], {}, {"Gloo": 9.0})
        for ranks in (2, 4)
        for memory in ("plain", "in place")
        for size in (64, 2**20, 2**28)
    ]

    AllReduceSweep(ranks=(2, 4)).draw(figure, rows)

    assert [axis.get_title() for axis in figure.axes] == ["2 ranks", "4 ranks"]
    for axis in figure.axes:
        sizes = [label.get_text() for label in axis.get_xticklabels()]
        assert 3 <= len(sizes) <= 5
        assert all(re.fullmatch(r"\d+ (B|KB|MB)", size) for size in sizes)
    times = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert times == ["1 us", "100 us", "10 ms", "1 s"]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["unisono, plain", "Gloo", "unisono, in place"]


def test_numbers_alone_come_out_when_they_are_asked_for_there() -> None:
    pytest.importorskip("rich")
    words = "bench reduce --sizes 4 --replicas 2 --seconds 0 --json -"

    result = CliRunner().invoke(main, words.split())

    content = json.loads(result.stdout)
    assert content["sweep"]["sizes"] == [4]
    assert content["machine"]["kernel"] == native_core().status
    assert "Left out: TensorFlow (give --tensorflow PYTHON)." in result.stderr


def test_a_row_has_the_percentiles_of_its_turns_and_ratios_of_medians() -> None:
    turns = [float(second) for second in range(101)]

    row = Row.compare({"case": "x"}, 8, turns, {"other": [25.0, 100.0, 1.0]}, lambda s: {"B/s": s})

    assert row.seconds == {"min": 0, "p50": 50, "p99": 99, "max": 100}
    assert row.ratios == {"other": 0.5}
    assert row.rates == {"B/s": 50}


@pytest.mark.parametrize("length", [1, 5, 65_521, 200_000])
@pytest.mark.parametrize("wrong", [False, True])
def test_one_wrong_element_of_an_all_reduce_is_noticed(length: int, wrong: bool) -> None:
    data = np.zeros(length, np.float32)

    def reduce_alone() -> None:
        # As if another rank had brought twice the same.
        data[:] *= 3
        data[-1] += wrong

    competitor = Competitor(reduce_alone, data, sum_factor(2))
    expectation = pytest.raises(RuntimeError, match="should be") if wrong else nullcontext()
    with expectation:
        take_turn(competitor, 0, lambda: None, seed=7, calls=1)


def test_one_wrong_element_of_a_reduction_is_noticed() -> None:
    items = [[torch.ones(5), torch.ones(5)]]

    check("right", items, [torch.full((5,), 2.0)])
    with pytest.raises(BenchmarkError, match="wrong by 1"):
        check("wrong", items, [torch.tensor([2.0, 2, 2, 2, 3])])


def test_losses_that_differ_are_noticed() -> None:
    check_losses("model", [1.0, 2.0], "DDP", [1.0, 2.00001])
    with pytest.raises(BenchmarkError, match="those of DDP"):
        check_losses("model", [1.0, 2.0], "DDP", [1.0, 2.01])
