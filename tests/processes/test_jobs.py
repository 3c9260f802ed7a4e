"""The jobs of examples/jobs, started as their launchers would start them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from processes.ports import free_ports
from processes.programs import clean_environment, run
from processes.test_clients import needs
from processes.test_meeting import SRUN

JOBS = Path(__file__).parents[2] / "examples" / "jobs"


@pytest.mark.parametrize("name", ["train.py", "ray_train.py"])
def test_the_first_lines_say_how_to_run_it(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((JOBS / name).read_text())) or ""

    assert f" examples/jobs/{name}" in docstring


def test_slurm(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    for name in ("slurm.sh", "train.py"):
        shutil.copy(JOBS / name, tmp_path)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o700)
    folders = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (port,) = free_ports(1)
    environ = clean_environment(
        PATH=folders, MASTER_PORT=str(port), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
    )

    status, output, errors = run(["bash", "-c", f"cd {tmp_path} && ./slurm.sh"], environ)

    assert status == 0, errors
    assert "has no UNISONO_JOB_TOKEN" not in errors
    losses = re.findall(r"^epoch \d, 2 replicas: loss (\S+)$", output, re.MULTILINE)
    # One of the two workers prints and saves.
    assert len(losses) == 5, output + errors
    assert float(losses[-1]) < 1e-3
    assert (tmp_path / "checkpoint.pt").exists()


@needs("ray", "pandas", "pyarrow")
def test_ray_train(tmp_path: Path) -> None:
    # Ray writes a token and its results into the home folder.
    environ = clean_environment(OMP_NUM_THREADS="1", HOME=str(tmp_path))

    status, output, errors = run([sys.executable, JOBS / "ray_train.py"], environ)

    assert status == 0, errors
    # Ray passes on what its workers print.
    found = re.search(r"epoch 5, 2 replicas: loss (\S+)", output + errors)
    assert found is not None, output + errors
    assert float(found[1]) < 1e-3
