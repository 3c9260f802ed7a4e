"""Which launcher has started this process.

The first that answers is used:

1. TF_CONFIG     TF_CONFIG is set: somebody has written down the cluster
2. torchrun      RANK or TORCHELASTIC_RUN_ID
3. mpirun        OMPI_COMM_WORLD_RANK (Open MPI) or MPI_LOCALRANKID (MPICH's Hydra)
4. srun          SLURM_PROCID together with SLURM_STEP_ID
5. other PMI     PMI_RANK or PMIX_RANK
6. Kubernetes    JOB_COMPLETION_INDEX together with UNISONO_NUM_WORKERS
7. none          the process is alone

torchrun and mpirun come before srun because they are often started inside a SLURM job, where the
processes still see the variables of the job or of the daemon that srun started for them. A bare
PMI_RANK comes after srun, which sets it as well. SLURM_STEP_ID tells a task of srun from the batch
script, which has the number of tasks in its environment but is only one process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from unisono.cluster.launchers import (
    NUM_WORKERS,
    TF_CONFIG,
    KubernetesClusterResolver,
    MpiClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
)
from unisono.cluster.resolver import ClusterResolver
from unisono.cluster.slurm import SlurmClusterResolver

_logger = logging.getLogger("unisono")


# One of the first variables must be set, and all of those that are needed with it.
_ORDER: tuple[tuple[str, Callable[..., ClusterResolver], set[str], set[str]], ...] = (
    ("TF_CONFIG", TFConfigClusterResolver, {TF_CONFIG}, set()),
    ("torchrun", TorchrunClusterResolver, {"RANK", "TORCHELASTIC_RUN_ID"}, set()),
    ("mpirun", MpiClusterResolver, {"OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"}, set()),
    ("srun", SlurmClusterResolver, {"SLURM_PROCID"}, {"SLURM_STEP_ID"}),
    ("PMI", MpiClusterResolver, {"PMI_RANK", "PMIX_RANK"}, set()),
    ("Kubernetes", KubernetesClusterResolver, {"JOB_COMPLETION_INDEX"}, {NUM_WORKERS}),
)


def detect(environ: Mapping[str, str] | None = None) -> ClusterResolver | None:
    """Returns a resolver for the launcher that has started this process, or None.

    A launcher that answers but has set something wrong is an error, and not a reason to ask the
    next one.
    """
    environ = os.environ if environ is None else environ
    found = [
        (name, resolver)
        for name, resolver, variables, needed in _ORDER
        if any(map(environ.get, variables)) and needed <= environ.keys()
    ]
    if not found:
        if environ.get("WORLD_SIZE"):
            # Several workers and nobody says which one this is: its error names the missing RANK.
            return TorchrunClusterResolver(environ=environ)
        _warn_of_workers_that_run_alone(environ)
        return None
    (chosen, resolver), *others = found
    made = resolver(environ=environ)
    ignored = f"; ignored: {', '.join(name for name, _ in others)}" if others else ""
    _logger.info("Found a cluster from %s%s.", chosen, ignored)
    return made


def _warn_of_workers_that_run_alone(environ: Mapping[str, str]) -> None:
    num_tasks = environ.get("SLURM_NTASKS", "1")
    if environ.get("JOB_COMPLETION_INDEX"):
        _logger.warning(
            "This is pod %s of an Indexed Job of Kubernetes, but %s is not set, so it runs alone. "
            "Set it in the manifest to the number of pods that train together.",
            environ["JOB_COMPLETION_INDEX"],
            NUM_WORKERS,
        )
    if num_tasks != "1":
        _logger.warning(
            "SLURM has %s tasks, but srun has not started this process, so it runs alone. Write "
            "`srun python script.py` in the batch script.",
            num_tasks,
        )
