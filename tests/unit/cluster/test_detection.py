from __future__ import annotations

import json
import logging

import pytest

from unisono.cluster import detect
from unisono.cluster_resolver import (
    ClusterResolver,
    KubernetesClusterResolver,
    MpiClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
)
from unisono.errors import ClusterError

CLUSTER = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
TF_CONFIG = {"TF_CONFIG": json.dumps(CLUSTER)}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NODELIST": "a",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "0",
    "UNISONO_NUM_WORKERS": "2",
    "UNISONO_COORDINATOR": "a:1",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a"}


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        (TF_CONFIG, TFConfigClusterResolver),
        (TORCHRUN, TorchrunClusterResolver),
        (OPEN_MPI, MpiClusterResolver),
        (HYDRA, MpiClusterResolver),
        (SLURM, SlurmClusterResolver),
        (PMI, MpiClusterResolver),
        (KUBERNETES, KubernetesClusterResolver),
        (KUBERNETES | TORCHRUN, TorchrunClusterResolver),
        (KUBERNETES | PMI, MpiClusterResolver),
        (PMI | SLURM, SlurmClusterResolver),
        # mpirun in a SLURM job: the variables of SLURM are those of its daemon.
        (SLURM | OPEN_MPI, MpiClusterResolver),
        (SLURM | HYDRA, MpiClusterResolver),
        (SLURM | OPEN_MPI | TORCHRUN, TorchrunClusterResolver),
        (SLURM | OPEN_MPI | TORCHRUN | TF_CONFIG, TFConfigClusterResolver),
    ],
)
def test_the_first_in_the_order_is_found(
    environ: dict[str, str], kind: type[ClusterResolver]
) -> None:
    assert type(detect(environ)) is kind


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"MASTER_ADDR": "a"}])
def test_without_a_launcher_there_is_no_cluster(environ: dict[str, str]) -> None:
    assert detect(environ) is None


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)

    assert type(detect()) is TorchrunClusterResolver


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (TORCHRUN, "Found a cluster from torchrun."),
        (TORCHRUN | SLURM | PMI, "Found a cluster from torchrun; ignored: srun, PMI."),
    ],
)
def test_a_log_line_says_who_was_found_and_who_was_ignored(
    environ: dict[str, str], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "unisono"):
        detect(environ)

    assert caplog.messages == [line]


def test_a_launcher_that_is_wrong_is_an_error_and_not_a_reason_to_ask_the_next() -> None:
    with pytest.raises(ClusterError, match="WORLD_SIZE"):
        detect({"RANK": "0"} | SLURM)


def test_a_number_of_workers_without_a_rank_is_refused_unless_another_launcher_answers() -> None:
    with pytest.raises(ClusterError, match="RANK, but it is missing"):
        detect({"WORLD_SIZE": "2"})

    assert type(detect({"WORLD_SIZE": "2"} | SLURM)) is SlurmClusterResolver


def test_a_pod_that_does_not_know_its_number_of_peers_is_alone_and_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert detect({"JOB_COMPLETION_INDEX": "1"}) is None
    assert "pod 1 of an Indexed Job of Kubernetes, but UNISONO_NUM_WORKERS" in caplog.text


def test_a_batch_script_without_srun_is_alone_and_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}

    assert detect(environ) is None
    assert "2 tasks, but srun has not started this process" in caplog.text
