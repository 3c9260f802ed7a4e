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


# Ends with the greatest status of its tasks, as the real one does.
SRUN_WITH_STATUS = (
    SRUN.replace("wait\n", "")
    + """
status=0
for task in $(jobs -p); do wait $task || status=$?; done
exit $status
"""
)
SCONTROL = """#!/bin/bash
echo "$@" >> scontrol.log
"""
# Sends the signal of --signal once, as soon as a task listens.
SITE = """
import os, signal

set_handler = signal.signal

def told(number, handler):
    before = set_handler(number, handler)
    if number == signal.SIGUSR1 and not os.path.exists("told"):
        open("told", "w").close()
        os.kill(os.getpid(), number)
    return before

signal.signal = told
"""


def test_slurm_and_its_queue(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    for name in ("slurm.sh", "train.py"):
        shutil.copy(JOBS / name, tmp_path)
    for name, text in {"srun": SRUN_WITH_STATUS, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    environ = clean_environment(
        PATH=f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        SLURM_JOB_ID="7",
    )

    results = []
    for _ in range(2):
        (port,) = free_ports(1)
        environ["MASTER_PORT"] = str(port)
        results.append(run(["bash", "-c", f"cd {tmp_path} && ./slurm.sh"], environ))

    (first, before, _), (second, output, errors) = results
    assert first == 42, results
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    assert second == 0, errors
    assert "has no UNISONO_JOB_TOKEN" not in errors
    # One of the two workers prints. The job was stopped within its first epoch.
    losses = re.findall(r"^epoch \d, 2 replicas: loss (\S+)$", output, re.MULTILINE)
    assert (before, len(losses)) == ("", 5), results
    assert float(losses[-1]) < 1e-3
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


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
