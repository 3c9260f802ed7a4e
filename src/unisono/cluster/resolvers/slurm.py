"""The variables that SLURM's srun sets for each task."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.cluster.address import Address, derived_port
from unisono.cluster.environment import LauncherVariables
from unisono.cluster.resolvers.coordinator import coordinator_address
from unisono.cluster.resolvers.resolver import ClusterResolver, Launch
from unisono.cluster.resolvers.slurm_lists import expand_counts, expand_hosts
from unisono.cluster.spec import ClusterSpec
from unisono.errors import ClusterError

_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


class SlurmClusterResolver(ClusterResolver):
    """A task that srun has started: SLURM_PROCID of SLURM_NTASKS.

    The first host of SLURM_STEP_NODELIST (or SLURM_NODELIST) is that of task 0. The port follows
    from SLURM_JOB_ID and SLURM_STEP_ID, so two jobs on one host seldom get the same:
    12000 + crc32("slurm-JOB.STEP") % 20000. MASTER_ADDR and MASTER_PORT, or UNISONO_COORDINATOR,
    say otherwise.

    Args:
        port: The port at which task 0 is reached.
        environ: The environment variables; those of this process if not given.
    """

    def __init__(
        self, port: int | None = None, *, environ: Mapping[str, str] | None = None
    ) -> None:
        variables = LauncherVariables("srun", environ)
        rank, size = variables.rank_and_size(("SLURM_PROCID",), _TASKS)
        job_id = variables.text("SLURM_JOB_ID", "SLURM_JOBID")
        step_id = variables.find("SLURM_STEP_ID", "SLURM_STEPID") or "0"
        job = f"slurm-{job_id}.{step_id}"
        hosts = expand_hosts(variables.text(*_HOSTS))
        first = coordinator_address(variables, job, hosts[0], port)
        assert first is not None
        placement = _hosts_by_rank(variables, hosts, size)
        super().__init__("worker", rank, environment="slurm")
        self._spec = ClusterSpec({"worker": _addresses(first, placement, job)})
        local_rank = variables.number_or(0, "SLURM_LOCALID")
        host = placement[rank]
        self._launch = Launch(
            job,
            local_rank=local_rank,
            local_size=local_rank + 1 if host is None else placement.count(host),
            restart_count=variables.number_or(0, "SLURM_RESTART_COUNT"),
        )

    def cluster_spec(self) -> ClusterSpec:
        """See `ClusterResolver.cluster_spec`."""
        return self._spec

    def launch(self) -> Launch:
        """See `ClusterResolver.launch`."""
        return self._launch


def _hosts_by_rank(variables: LauncherVariables, hosts: list[str], size: int) -> list[str | None]:
    """The host of each task, or Nones where the way of placing them does not tell."""
    text = variables.find(*_TASKS_PER_NODE)
    placing = variables.find("SLURM_DISTRIBUTION") or "block"
    if text is None or not placing.startswith("block"):
        return [None] * size
    counts = expand_counts(text)
    if len(counts) != len(hosts) or sum(counts) != size:
        raise ClusterError(
            f"SLURM's variables do not go together: {size} tasks ({' or '.join(_TASKS)}), tasks "
            f"per node {text!r} ({' or '.join(_TASKS_PER_NODE)}), but the hosts "
            f"{', '.join(hosts)}. Start the script with srun in the allocation that set them."
        )
    return [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]


def _addresses(first: Address, placement: list[str | None], job: str) -> list[str | None]:
    """The address of task 0, and one for each of the others, who have no use for it."""
    port = derived_port(job)
    others = [
        host and str(Address(host, port + rank)) for rank, host in enumerate(placement) if rank > 0
    ]
    return [str(first), *others]
