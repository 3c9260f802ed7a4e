"""The suite of all communicators over MPI, where there is an mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes.ports import free_port

TESTS = Path(__file__).parents[1]
# Beside the interpreter, where pip puts it, or anywhere else.
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")

pytestmark = pytest.mark.skipif(
    MPIRUN is None or find_spec("mpi4py") is None, reason="needs mpirun and mpi4py"
)


def test_every_collective_over_mpi_has_the_bits_of_the_tree_and_a_late_rank_is_named() -> None:
    program = TESTS / "conformance" / "mpi_program.py"
    ended = subprocess.run(
        [str(MPIRUN), "-n", "3", sys.executable, str(program), str(free_port())],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )

    told = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank"))
    assert told == [f"rank {rank}: failed [], then WorkerTimeoutError (1,)" for rank in range(3)], (
        ended.stderr
    )
