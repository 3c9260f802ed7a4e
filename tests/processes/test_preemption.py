"""Workers that are told to end stop after the same step, and the job resumes to the same bits."""

from __future__ import annotations

import gc
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch

from processes.programs import clean_environment, launcher, program, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "preemption.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example sets the number of threads, which must not outlast the test."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def here(folder: Path, *arguments: object) -> str:
    """Trains four replicas in this process, and returns the bits; "" if it has left."""
    main = runpy.run_path(str(EXAMPLE))["main"]
    try:
        return str(main(["--folder", str(folder), *map(str, arguments)]))
    except SystemExit as left:
        assert left.code == 0
    # In a program, the strategy ends with the process.
    gc.collect()
    return ""


def of_two(folder: Path, *arguments: object) -> list[str | Path]:
    """The arguments of two workers with two replicas each."""
    return [EXAMPLE, "--replicas", "2", "--folder", folder, *map(str, arguments)]


def test_a_job_moves_between_layouts_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed, moved = tmp_path / "undisturbed", tmp_path / "moved"
    bits = here(undisturbed, "--steps", 20)

    # Only worker 1 of the two is told.
    assert here(moved, "--steps", 20, "--stop-after", 4) == ""
    command = launcher("-n", "2", *of_two(moved, "--steps", 20, "--stop-after", 13))
    status, output, errors = run(command, clean_environment())
    resumed = here(moved, "--steps", 20)

    assert status == 0, errors
    assert "4 replicas, from step 4" in output
    # Both workers have left after the same step, and there is one checkpoint.
    steps = re.findall(r"\[worker \d\] Saving and leaving after step (\d+)", errors)
    assert len(steps) == 2 and steps[0] == steps[1], errors
    assert int(steps[0]) in (13, 14)
    assert [path.name for path in moved.iterdir()] == ["ckpt-2.pt"]
    assert resumed == bits


def test_a_launcher_that_is_told_to_end_lets_its_workers_save(tmp_path: Path) -> None:
    command = launcher("-n", "2", *of_two(tmp_path / "saved", "--steps", 10**9))

    with program(command, clean_environment(TMPDIR=str(tmp_path))) as process:
        assert process.stdout is not None
        assert "from step 0" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)

    assert process.returncode == 0, errors
    steps = re.findall(r"Saving and leaving after step (\d+)", errors)
    assert len(steps) == 2 and steps[0] == steps[1], errors
    assert len(list((tmp_path / "saved").iterdir())) == 1


def test_torchrun_restarts_workers_that_leave_with_a_status(tmp_path: Path) -> None:
    bits = here(tmp_path / "undisturbed", "--steps", 20)
    arguments = of_two(tmp_path / "saved", "--steps", 20, "--stop-after", 7, "--exit-status", 42)

    command = [*TORCHRUN, "--max-restarts=1", *arguments]
    status, output, errors = run(command, clean_environment(OMP_NUM_THREADS="1"))

    assert status == 0, errors
    starts = re.findall(r"from step (\d+)", output)
    assert starts[0] == "0" and int(starts[1]) in (7, 8)
    assert f"bits {bits}" in output
