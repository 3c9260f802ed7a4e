"""What launchers leave in the environment: TF_CONFIG, torchrun, mpirun and Kubernetes.

`slurm` reads the variables of srun, and `detection` says which launcher counts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from unisono.arguments import check_optional
from unisono.cluster.resolver import KnownCluster, Launch
from unisono.cluster.spec import Address, ClusterSpec, derived_port, validate
from unisono.errors import ClusterError

COORDINATOR = "UNISONO_COORDINATOR"
NUM_WORKERS = "UNISONO_NUM_WORKERS"
TF_CONFIG = "TF_CONFIG"
_EXAMPLE = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
)
# Open MPI's names, and those of MPICH's Hydra.
_MPI_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_MPI_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_MPI_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_MPI_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_MPI_JOB = ("PMIX_NAMESPACE", "PMI_JOBID", "OMPI_MCA_ess_base_jobid")


class LauncherVariables:
    """The environment as one launcher sets it. Errors say which variable is wrong, and why."""

    def __init__(self, launcher: str, environ: Mapping[str, str] | None = None) -> None:
        check_optional("environ", environ, Mapping, "a dict of environment variables")
        self._launcher = launcher
        self._environ = os.environ if environ is None else environ

    def find(self, *names: str) -> str | None:
        """Returns the first of the variables that is set."""
        return next((str(self._environ[name]) for name in names if name in self._environ), None)

    def text(self, *names: str) -> str:
        """Returns the first of the variables that is set; one must be."""
        found = self.find(*names)
        if not found:
            raise ClusterError(
                f"{self._launcher} sets {' or '.join(names)}, but it is "
                f"{'missing' if found is None else 'empty'} here{self._beside(names)}. Start the "
                f"script with {self._launcher}, or set the variable."
            )
        return found

    def number(self, *names: str) -> int:
        """Returns the first of the variables that is set, which must hold a number of 0 or more."""
        text = self.text(*names)
        if not (text.isascii() and text.isdigit()):
            name = next(name for name in names if name in self._environ)
            raise ClusterError(
                f"{name} must be a whole number of 0 or more, as {self._launcher} sets it; found "
                f"{text!r}. Start the script with {self._launcher}, or unset the variable."
            )
        return int(text)

    def number_or(self, default: int, *names: str) -> int:
        """Returns the first of the variables that is set, as a number, or `default`."""
        return default if self.find(*names) is None else self.number(*names)

    def rank_and_size(self, rank: tuple[str, ...], size: tuple[str, ...]) -> tuple[int, int]:
        """Returns a rank and the number of ranks, which must go together."""
        found_rank, found_size = self.number(*rank), self.number(*size)
        if found_rank >= found_size:
            raise ClusterError(
                f"{' or '.join(rank)} must be less than {' or '.join(size)}; found {found_rank} "
                f"of {found_size}. Start the script with {self._launcher}, or set both alike."
            )
        return found_rank, found_size

    def coordinator(self, job: str, host: str | None, port: int | None = None) -> Address | None:
        """Returns the address of rank 0, or None if nobody tells its host.

        UNISONO_COORDINATOR comes first, then MASTER_ADDR and MASTER_PORT, then the host and the
        port given; without a port, one derived from the name of the job.
        """
        whole = self.find(COORDINATOR)
        if whole is not None:
            return Address.parse(whole)
        named = self.find("MASTER_ADDR") or host
        if named is None:
            return None
        return Address(named, port or self.number_or(derived_port(job), "MASTER_PORT"))

    def _beside(self, names: tuple[str, ...]) -> str:
        """The variables of the same family that are set, for a message."""
        family = {name.split("_")[0] for name in names} | {"RANK", "WORLD", "MASTER"}
        found = [
            f"{name}={text!r}"
            for name, text in sorted(self._environ.items(), key=str)
            if isinstance(name, str) and name.split("_")[0] in family and name not in names
        ]
        return f" (found {', '.join(found[:8])})" if found else ""


class TFConfigClusterResolver(KnownCluster):
    """The cluster that TF_CONFIG describes; without TF_CONFIG, a process that is alone.

    TF_CONFIG is a JSON object: `cluster` holds addresses by job name, `task` a `type` and an
    `index`; `rpc_layer`, `session_master` and `environment` may be there.

    Args:
        task_type: Counts instead of the task type that TF_CONFIG gives.
        task_id: Counts instead of the task index that TF_CONFIG gives.
        rpc_layer: Counts instead of that of TF_CONFIG.
        environment: Counts instead of that of TF_CONFIG.
        environ: The environment variables; those of this process if not given.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        config = _parse(LauncherVariables("a TF_CONFIG cluster", environ).find(TF_CONFIG))
        task = _object(config, "task")
        self._spec = ClusterSpec(_object(config, "cluster"))
        if not self._spec:
            # Some schedulers describe a job of one process by a task without a cluster.
            task = {}
        super().__init__(
            _text(task, "type") if task_type is None else task_type,
            _index(task) if task_id is None else task_id,
            _text(config, "rpc_layer") if rpc_layer is None else rpc_layer,
            (_text(config, "environment") or "") if environment is None else environment,
        )
        self._session_master = _text(config, "session_master")
        try:
            validate(self._spec, self.task_type, self.task_id)
        except ClusterError as error:
            raise ClusterError(f"The task in TF_CONFIG is not usable. {error}") from None

    def _told_master(self, *task: object) -> str | None:
        return self._session_master or None


def tf_config_cluster(text: str | None) -> ClusterSpec:
    """Returns the cluster of a TF_CONFIG; an empty one if there is none."""
    return ClusterSpec(_object(_parse(text), "cluster"))


def _parse(text: str | None) -> dict[str, Any]:
    text = text or "{}"
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON ({error}). Found {text[:200]!r}; write it like {_EXAMPLE}."
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG must be a JSON object such as {_EXAMPLE}; found {config!r}.")
    return config


def _object(config: Mapping[str, Any], key: str) -> Any:
    return _checked(key, config.get(key) or {}, dict, f"an object, as in {_EXAMPLE}")


def _text(config: Mapping[str, Any], key: str) -> Any:
    return _checked(key, config.get(key), (str, type(None)), "a string")


def _checked(key: str, found: Any, kind: Any, wanted: str) -> Any:
    if not isinstance(found, kind):
        raise ClusterError(f"`{key}` in TF_CONFIG must be {wanted}; found {found!r}.")
    return found


def _index(task: Mapping[str, Any]) -> int | None:
    found = task.get("index")
    with suppress(ValueError):
        if found is None or (isinstance(found, (int, str)) and not isinstance(found, bool)):
            return None if found is None else int(found)
    raise ClusterError(
        f"The `index` of `task` in TF_CONFIG must be a whole number; found {found!r}."
    )


class TorchrunClusterResolver(KnownCluster):
    """A worker that torchrun has started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    LOCAL_RANK, LOCAL_WORLD_SIZE and the variables TORCHELASTIC_* are used where they are set.

    Args:
        environ: The environment variables; those of this process if not given.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        variables = LauncherVariables("torchrun", environ)
        rank, size = variables.rank_and_size(("RANK",), ("WORLD_SIZE",))
        local_rank, local_size = _local(variables)
        address = str(Address(variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")))
        super().__init__("worker", rank, environment="torchrun")
        self._spec = ClusterSpec({"worker": [address, *[None] * (size - 1)]})
        # The run id alone is "none" in every job that gives no address for a rendezvous.
        self._launch = Launch(
            job=f"torchrun-{variables.find('TORCHELASTIC_RUN_ID') or 'none'}@{address}",
            local_rank=local_rank,
            local_size=local_size,
            restart_count=variables.number_or(0, "TORCHELASTIC_RESTART_COUNT"),
            uses_existing_store=variables.find("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def _local(variables: LauncherVariables) -> tuple[int, int]:
    if variables.find("LOCAL_WORLD_SIZE") is not None:
        return variables.rank_and_size(("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
    # Started by hand: the neighbors before this worker are all that is known.
    local_rank = variables.number_or(0, "LOCAL_RANK")
    return local_rank, local_rank + 1


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
        rank, size = variables.rank_and_size(_MPI_RANK, _MPI_SIZE)
        local_rank = variables.number_or(0, *_MPI_LOCAL_RANK)
        local_size = variables.number_or(local_rank + 1, *_MPI_LOCAL_SIZE)
        job = f"mpi-{variables.find(*_MPI_JOB) or 'unnamed'}"
        host = "127.0.0.1" if local_size == size else None
        first = variables.coordinator(job, host)
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


class KubernetesClusterResolver(KnownCluster):
    """A pod of an Indexed Job, alone or in a JobSet: worker JOB_COMPLETION_INDEX of the job.

    Kubernetes numbers the pods. The manifest says the rest: UNISONO_NUM_WORKERS, the number of
    pods, and UNISONO_COORDINATOR, host:port of pod 0, or MASTER_ADDR alone. If pod 0 is called
    NAME-0.SERVICE, the others are NAME-1.SERVICE and so on, with the same port: in an elastic job,
    a pod that comes back finds them there. Only the environment is read, so a pod needs no access
    to the API of the cluster.

    Args:
        environ: The environment variables; those of this process if not given.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        variables = LauncherVariables("an Indexed Job of Kubernetes", environ)
        rank, size = variables.rank_and_size(("JOB_COMPLETION_INDEX",), (NUM_WORKERS,))
        first = variables.coordinator("kubernetes", None)
        if first is None:
            raise ClusterError(
                f"The manifest says that {size} pods train together, but not where pod 0 is. Set "
                f"{COORDINATOR} in it, for example 'JOB-0.SERVICE:29500', where SERVICE is a "
                "headless service and the `subdomain` of the pods."
            )
        super().__init__("worker", rank, environment="kubernetes")
        addresses = [str(first), *(_address_of(rank, first) for rank in range(1, size))]
        self._spec = ClusterSpec({"worker": addresses})
        self._launch = Launch(job=f"kubernetes-{first}")


def _address_of(rank: int, first: Address) -> str | None:
    """Returns the address of another pod, if the name of pod 0 tells it."""
    host, is_numbered = re.subn(r"^([^.]+)-0(?=\.)", rf"\g<1>-{rank}", first.host)
    return str(Address(host, first.port)) if is_numbered else None
