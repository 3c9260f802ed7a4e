"""Workers that get SIGTERM stop after the same step, and the job resumes to the same bits."""

from __future__ import annotations

import re
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from worker_threads import end_replica_threads

from processes.programs import clean_environment, launcher, program, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "preemption.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """A program that leaves keeps its handler of SIGTERM to the end."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example sets the number of threads, which must not outlast the test."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def here(folder: Path, *arguments: object) -> str:
    """Trains four replicas in this process, and returns the bits; "" if it has left."""
    main = runpy.run_path(str(EXAMPLE))["main"]
    try:
        return str(main(["--folder", str(folder), *map(str, arguments)]))
    except SystemExit as error:
        left = error.code
    # In a program, the strategy ends with the process.
    end_replica_threads()
    assert left == 0
    return ""


def of_two(folder: Path, *arguments: object) -> list[str | Path]:
    """The arguments of two workers with two replicas each."""
    return [EXAMPLE, "--replicas", "2", "--folder", folder, *map(str, arguments)]


def last_steps(errors: str) -> list[int]:
    """After which steps the workers say that they leave."""
    return [int(step) for step in re.findall(r"Saving and leaving after step (\d+)", errors)]


def test_a_job_moves_between_layouts_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed, moved = tmp_path / "undisturbed", tmp_path / "moved"
    bits = here(undisturbed, "--steps", 20)

    # Only worker 1 of the two gets the signal.
    assert here(moved, "--steps", 20, "--stop-after", 4) == ""
    command = launcher("-n", "2", *of_two(moved, "--steps", 20, "--stop-after", 13))
    status, output, errors = run(command, clean_environment())
    resumed = here(moved, "--steps", 20)

    assert status == 0, errors
    assert "4 replicas, from step 4" in output
    # Both workers have left after the same step, and there is one checkpoint.
    assert last_steps(errors) in ([13, 13], [14, 14]), errors
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
    first, second = last_steps(errors)
    assert first == second
    assert len(list((tmp_path / "saved").iterdir())) == 1


def test_the_others_go_on_without_a_preempted_worker_of_an_elastic_job(tmp_path: Path) -> None:
    bits = here(tmp_path / "undisturbed", "--steps", 9)
    command = launcher("-n", "2", "--elastic", EXAMPLE, "--elastic", "--folder", tmp_path / "saved")

    status, output, errors = run([*command, "--steps", "9", "--stop-after", "3"])

    assert status == 0, errors
    assert f"bits {bits}" in output
    # The worker has left with status 0, so nothing was started again, and nothing was saved.
    assert "Worker 1 left: worker 0 takes over replicas 2, 3." in errors
    assert "ended" not in errors
    assert not (tmp_path / "saved").exists()


def test_torchrun_restarts_workers_that_leave_with_a_status(tmp_path: Path) -> None:
    bits = here(tmp_path / "undisturbed", "--steps", 20)
    arguments = of_two(tmp_path / "saved", "--steps", 20, "--stop-after", 7, "--exit-status", 42)

    command = [*TORCHRUN, "--max-restarts=1", *arguments]
    status, output, errors = run(command, clean_environment(OMP_NUM_THREADS="1"))

    assert status == 0, errors
    assert re.findall(r"from step (\d+)", output) in (["0", "7"], ["0", "8"])
    assert f"bits {bits}" in output
