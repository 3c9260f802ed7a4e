"""The scripts about traces run: what draws one, and what measures their cost."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as uo
from unit.tracing.test_training import training

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def run_script(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")


def test_steps_of_a_trace_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    with training(num_replicas=2) as step, uo.tracing.record(tmp_path):
        for _ in range(3):
            step()

    run_script(monkeypatch, "draw_trace.py", tmp_path, picture, "--first", 2, "--steps", 1)

    assert picture.stat().st_size > 1000


def test_the_cost_of_a_trace_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    num_threads = torch.get_num_threads()
    try:
        run_script(monkeypatch, "tracing.py", "--seconds", 0.05)
    finally:
        torch.set_num_threads(num_threads)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["step", "off"], ["span", "off"]]
