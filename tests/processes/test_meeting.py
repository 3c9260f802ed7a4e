"""Workers as real processes that each launcher could have started."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import socket
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import Store

from processes.harness import run_ranks
from processes.ports import free_ports
from processes.programs import clean_environment, run, run_together

# Prints rank, size, job and the ranks it has met, or the name and the text of the error.
WORKER = """
import json, os, sys
from unisono.cluster import Membership, WorkerCard, detect, meet, open_store
from unisono.errors import UnisonoError

timeout_seconds = float(os.environ.get("TEST_TIMEOUT", "30"))
try:
    membership = Membership.of(detect())
    store = open_store(membership, timeout_seconds)
    card = WorkerCard.of(membership, num_devices=1)
    met = meet(store, card, timeout_seconds)
    answer = [membership.rank, membership.size, membership.job, [one.rank for one in met]]
except UnisonoError as error:
    answer = [type(error).__name__, str(error)]
# Workers of torchrun share a pipe and write without a buffer, so a line must be one write.
sys.stdout.write("ANSWER " + json.dumps(answer) + "\\n")
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return script


def answers(text: str) -> list[Any]:
    return [
        json.loads(line.partition("ANSWER ")[2]) for line in text.splitlines() if "ANSWER" in line
    ]


def tf_config(size: int, index: int, port: int, **variables: str) -> dict[str, str]:
    # Only the first address is listened at.
    cluster = {"worker": [f"127.0.0.1:{port + rank}" for rank in range(size)]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
    return clean_environment(TF_CONFIG=json.dumps(config), **variables)


def together(worker: Path, environs: list[dict[str, str]]) -> list[Any]:
    found = run_scripts([worker] * len(environs), environs)
    return [answer for of_one in found for answer in of_one]


def run_scripts(scripts: list[Path], environs: list[dict[str, str]]) -> list[list[Any]]:
    """What each script answers, all at the same time, in processes that have torch already."""
    return run_ranks(len(scripts), _run_script, [str(one) for one in scripts], environs)


def _run_script(
    _: Store, rank: int, size: int, scripts: list[str], environs: list[dict[str, str]]
) -> list[Any]:
    os.environ.clear()
    os.environ.update(environs[rank])
    sys.argv = [scripts[rank]]
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(scripts[rank], run_name="__main__")
    return answers(output.getvalue())


def test_tf_config_in_several_shells(worker: Path) -> None:
    (port,) = free_ports(1)

    results = run_together([sys.executable, worker], [tf_config(2, i, port) for i in range(2)])

    found = [answer for _, output, _ in results for answer in answers(output)]
    (job,) = {job for _, _, job, _ in found}
    assert found == [[rank, 2, job, [0, 1]] for rank in range(2)]


def test_torchrun(worker: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    status, output, errors = run([*command, "--nproc-per-node=2", worker])

    assert status == 0, errors
    found = sorted(answers(output))
    (job,) = {job for _, _, job, _ in found}
    assert found == [[rank, 2, job, [0, 1]] for rank in range(2)]


def test_variables_of_torchrun_set_by_hand(worker: Path) -> None:
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}

    found = together(worker, [clean_environment(RANK=rank, **common) for rank in "01"])

    assert [answer[3] for answer in found] == [[0, 1]] * 2


def test_variables_of_srun_set_by_hand(worker: Path) -> None:
    (port,) = free_ports(1)
    environs = [
        clean_environment(
            SLURM_JOB_ID="7",
            SLURM_STEP_ID="0",
            SLURM_PROCID=rank,
            SLURM_LOCALID=rank,
            SLURM_NTASKS="3",
            SLURM_STEP_NODELIST="localhost",
            SLURM_STEP_TASKS_PER_NODE="3",
            MASTER_PORT=str(port),
        )
        for rank in "012"
    ]

    found = together(worker, environs)

    assert found == [[rank, 3, "slurm-7.0", [0, 1, 2]] for rank in range(3)]


def test_variables_of_kubernetes_set_by_hand(worker: Path) -> None:
    (port,) = free_ports(1)
    common = {"UNISONO_NUM_WORKERS": "2", "UNISONO_COORDINATOR": f"localhost:{port}"}
    common |= {"UNISONO_JOB_TOKEN": "secret"}

    found = together(worker, [clean_environment(JOB_COMPLETION_INDEX=r, **common) for r in "01"])

    assert found == [[r, 2, f"kubernetes-localhost:{port}", [0, 1]] for r in range(2)]


# Starts the tasks as srun does: with the environment of the batch script, and a number for each.
SRUN = """#!/bin/bash
export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost
export SLURM_STEP_TASKS_PER_NODE=2
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
wait
"""


def test_the_batch_script_of_the_documentation(worker: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    page = Path(__file__).parents[2] / "docs" / "launchers.md"
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page.read_text(), re.DOTALL)
    for name, text in {"srun": SRUN, "batch": script}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    worker.rename(tmp_path / "train.py")
    folders = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (port,) = free_ports(1)
    environ = clean_environment(PATH=folders, MASTER_PORT=str(port))

    status, output, errors = run(["bash", "-c", f"cd {tmp_path} && ./batch"], environ)

    assert status == 0, errors
    assert "has no UNISONO_JOB_TOKEN" not in errors
    assert sorted(answers(output)) == [[rank, 2, "slurm-7.0", [0, 1]] for rank in range(2)]


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD", "PMI"])
def test_variables_of_mpirun_set_by_hand(worker: Path, name: str) -> None:
    local = {"OMPI_COMM_WORLD": "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI": "MPI_LOCALNRANKS"}[name]
    (port,) = free_ports(1)
    common = {f"{name}_SIZE": "2", local: "2", "MASTER_PORT": str(port)}

    found = together(worker, [clean_environment(**common, **{f"{name}_RANK": r}) for r in "01"])

    assert found == [[rank, 2, "mpi-unnamed", [0, 1]] for rank in range(2)]


@pytest.mark.parametrize("mpirun", ["mpirun", "mpiexec.hydra"])
def test_mpirun_itself(worker: Path, mpirun: str) -> None:
    if shutil.which(mpirun) is None:
        pytest.skip(f"there is no {mpirun}")
    # Open MPI refuses otherwise to start for root, or more processes than there are cores.
    wishes = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    wishes |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    environ = clean_environment(**wishes)

    status, output, errors = run([mpirun, "-n", "3", sys.executable, worker], environ)

    assert status == 0, errors
    found = sorted(answers(output))
    (job,) = {job for _, _, job, _ in found}
    assert found == [[rank, 3, job, [0, 1, 2]] for rank in range(3)]


def test_an_evaluator_is_alone(worker: Path) -> None:
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}

    (found,) = together(worker, [clean_environment(TF_CONFIG=json.dumps(config))])

    assert found[:2] == [0, 1]


def test_another_script_is_told_to_every_process(worker: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    other = tmp_path / "other.py"
    other.write_text(WORKER)

    environs = [tf_config(2, index, port) for index in range(2)]
    found = [answer for (answer,) in run_scripts([worker, other], environs)]

    assert [name for name, _ in found] == ["JobMismatchError"] * 2
    assert all("worker.py" in message and "other.py" in message for _, message in found)


def test_another_world_size_is_told_to_every_process(worker: Path) -> None:
    (port,) = free_ports(1)
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sizes = ["2", "3"]

    found = together(
        worker,
        [clean_environment(RANK=str(r), WORLD_SIZE=s, **common) for r, s in enumerate(sizes)],
    )

    assert [name for name, _ in found] == ["JobMismatchError"] * 2
    assert all("2 on rank 0, 3 on rank 1" in message for _, message in found)


def test_another_token_is_refused(worker: Path) -> None:
    (port,) = free_ports(1)
    tokens = ["right", "wrong"]

    waiting, refused = together(
        worker,
        [
            tf_config(2, index, port, UNISONO_JOB_TOKEN=token, TEST_TIMEOUT="12")
            for index, token in enumerate(tokens)
        ],
    )

    assert waiting[0] == "WorkerTimeoutError"
    assert refused[0] == "JobMismatchError"
    assert "UNISONO_JOB_TOKEN" in refused[1]


def test_a_rank_that_does_not_come_is_named(worker: Path) -> None:
    (port,) = free_ports(1)

    found = together(worker, [tf_config(3, index, port, TEST_TIMEOUT="12") for index in range(2)])

    assert [name for name, _ in found] == ["WorkerTimeoutError"] * 2
    assert all("rank 2 has not connected" in message for _, message in found)


def test_a_port_in_use_is_told_with_what_to_do(worker: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        ((name, message),) = together(worker, [tf_config(2, 0, port)])

    assert name == "CommunicationError"
    assert f"port {port} is already in use on this host" in message


def test_nobody_at_the_address_is_told_with_the_address_and_the_time(worker: Path) -> None:
    (port,) = free_ports(1)

    ((name, message),) = together(worker, [tf_config(2, 1, port, TEST_TIMEOUT="1.5")])

    assert name == "WorkerTimeoutError"
    assert f"tried for 1.5 s to reach rank 0 at 127.0.0.1:{port}" in message


def test_a_name_that_rank_0_does_not_know_is_told(worker: Path) -> None:
    cluster = {"worker": ["no.such.host.invalid:1", "b:1"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}

    ((name, message),) = together(worker, [clean_environment(TF_CONFIG=json.dumps(config))])

    assert name == "CommunicationError"
    assert "no.such.host.invalid:1" in message
