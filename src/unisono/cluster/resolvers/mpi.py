"""The variables that mpirun sets for each process: Open MPI, and MPICH's Hydra."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.cluster.environment import COORDINATOR, LauncherVariables, coordinator_address
from unisono.cluster.resolvers.resolver import KnownCluster, Launch
from unisono.cluster.spec import ClusterSpec
from unisono.errors import ClusterError

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_JOB = ("PMIX_NAMESPACE", "PMI_JOBID", "OMPI_MCA_ess_base_jobid")


class MpiClusterResolver(KnownCluster):
    """A process that mpirun or mpiexec has started.

    MPI numbers the processes but does not tell where the first one is. On one host this is
    127.0.0.1; for several, set MASTER_ADDR (and MASTER_PORT), or UNISONO_COORDINATOR to host:port.
    MPI itself is not needed: only the environment is read.

    Args:
        environ: The environment variables; those of this process if not given.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        variables = LauncherVariables("mpirun", environ)
        rank, size = variables.rank_and_size(_RANK, _SIZE)
        local_rank = variables.number_or(0, *_LOCAL_RANK)
        local_size = variables.number_or(local_rank + 1, *_LOCAL_SIZE)
        job = f"mpi-{variables.find(*_JOB) or 'unnamed'}"
        host = "127.0.0.1" if local_size == size else None
        first = coordinator_address(variables, job, host, port=None)
        if first is None:
            raise ClusterError(
                f"mpirun has started {size} processes, {local_size} of them here, and does not "
                f"tell the others where rank 0 is. Set {COORDINATOR} to the host:port of rank 0 "
                f"for all of them: with Open MPI `mpirun -x {COORDINATOR}=host:port`, with MPICH "
                f"`mpiexec -genv {COORDINATOR} host:port`."
            )
        super().__init__("worker", rank, environment="mpi")
        self._spec = ClusterSpec({"worker": [str(first), *[None] * (size - 1)]})
        self._launch = Launch(job, local_rank=local_rank, local_size=local_size)
