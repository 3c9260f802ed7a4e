from __future__ import annotations

import pytest

from unisono.cluster import Launch
from unisono.cluster.spec import derived_port
from unisono.cluster_resolver import MpiClusterResolver
from unisono.errors import ClusterError

# What mpirun of Open MPI 5.0.11 and mpiexec of MPICH's Hydra were seen to set.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-6206@1",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environ", "job"), [(OPEN_MPI, "mpi-prterun-vm-6206@1"), (HYDRA, "mpi-unnamed")]
)
def test_on_one_host_everything_is_known(environ: dict[str, str], job: str) -> None:
    found = MpiClusterResolver(environ=environ)

    first = f"127.0.0.1:{derived_port(job)}"
    assert found.cluster_spec().job_tasks("worker") == [first, None]
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert found.environment == "mpi"
    assert found.launch() == Launch(job, local_rank=1, local_size=2)


@pytest.mark.parametrize(
    "environ",
    [OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, HYDRA | {"PMI_SIZE": "4"}],
)
def test_on_several_hosts_the_address_of_rank_0_is_asked_for(environ: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match=r"4 processes, 2 of them here.*UNISONO_COORDINATOR"):
        MpiClusterResolver(environ=environ)


@pytest.mark.parametrize(
    ("others", "first"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "7"}, "a:7"),
        ({"MASTER_ADDR": "a"}, f"a:{derived_port('mpi-prterun-vm-6206@1')}"),
        ({"UNISONO_COORDINATOR": "b:8", "MASTER_ADDR": "a"}, "b:8"),
    ],
)
def test_the_address_of_rank_0_can_be_given(others: dict[str, str], first: str) -> None:
    environ = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"} | others

    found = MpiClusterResolver(environ=environ)

    assert found.cluster_spec().job_tasks("worker") == [first, None, None, None]


def test_a_coordinator_that_is_no_address_is_refused() -> None:
    with pytest.raises(ClusterError, match="'here'"):
        MpiClusterResolver(environ=OPEN_MPI | {"UNISONO_COORDINATOR": "here"})


def test_a_rank_without_a_size_is_refused() -> None:
    with pytest.raises(ClusterError, match="OMPI_COMM_WORLD_SIZE or PMI_SIZE, but it is missing"):
        MpiClusterResolver(environ={"PMIX_RANK": "0"})


def test_a_rank_that_is_no_number_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"PMI_RANK must be a whole number.*found 'x'"):
        MpiClusterResolver(environ=HYDRA | {"PMI_RANK": "x"})
