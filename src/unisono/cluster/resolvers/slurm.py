"""The variables that SLURM's srun sets for each task, and which GPUs of its host a task uses."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.cluster.environment import LauncherVariables, coordinator_address
from unisono.cluster.resolvers.resolver import KnownCluster, Launch
from unisono.cluster.resolvers.slurm_lists import expand_counts, expand_hosts
from unisono.cluster.rules import JOBS
from unisono.cluster.spec import Address, ClusterSpec, derived_port
from unisono.devices.machine import this_machine
from unisono.errors import ClusterError

_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


class SlurmClusterResolver(KnownCluster):
    """A task that srun has started: SLURM_PROCID of SLURM_NTASKS.

    The first host of SLURM_STEP_NODELIST (or SLURM_NODELIST) is that of task 0. The port follows
    from SLURM_JOB_ID and SLURM_STEP_ID, so two jobs on one host rarely get the same:
    12000 + crc32("slurm-JOB.STEP") % 20000. MASTER_ADDR and MASTER_PORT, or UNISONO_COORDINATOR,
    say otherwise.

    Args:
        jobs: How many tasks each job has, such as `{"chief": 1, "worker": 3}`. Tasks are given to
            the jobs in the order of their names. None means that all tasks are workers.
        port_base: The port of the first task of each host; the next tasks have the next ports.
        gpus_per_node: How many GPUs each host has; counted if None.
        gpus_per_task: How many GPUs each task uses; an even share of the host's if None.
        tasks_per_node: How many tasks each host has: a number, or a dict of numbers by host. None
            means what SLURM says.
        auto_set_gpu: Whether the tasks of a host take its GPUs in turn. If not, each takes the
            first ones that it sees, which is right where SLURM shows each task its own.
        rpc_layer: A protocol to write before the addresses that `master` returns, or None.
        environ: The environment variables; those of this process if not given.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,  # noqa: FBT001, FBT002 - the signature of TensorFlow
        rpc_layer: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        variables = LauncherVariables("srun", environ)
        rank, size = variables.rank_and_size(("SLURM_PROCID",), _TASKS)
        job_id = variables.text("SLURM_JOB_ID", "SLURM_JOBID")
        step_id = variables.find("SLURM_STEP_ID", "SLURM_STEPID") or "0"
        job = f"slurm-{job_id}.{step_id}"
        hosts = expand_hosts(variables.text(*_HOSTS))
        first = coordinator_address(variables, job, hosts[0], port_base)
        assert first is not None
        placement = _hosts_by_rank(variables, hosts, size, tasks_per_node)
        shares = SharedGpus(gpus_per_node, gpus_per_task, _most_tasks(placement, size))
        named = named_tasks(jobs, size)
        super().__init__(*named[rank], rpc_layer=rpc_layer, environment="slurm")
        self._spec = spec_of(named, _addresses(first, placement, job, port_base))
        self._local_rank = local_rank = variables.number_or(0, "SLURM_LOCALID")
        self._shares, self._auto_set_gpu = shares, auto_set_gpu
        host = placement[rank]
        self._launch = Launch(
            job,
            local_rank=local_rank,
            local_size=local_rank + 1 if host is None else placement.count(host),
            restart_count=variables.number_or(0, "SLURM_RESTART_COUNT"),
        )

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job of this process and its number there."""
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """See `ClusterResolver.num_accelerators`; a number given at the start holds for all."""
        if not self._shares.are_given:
            return super().num_accelerators(task_type, task_id)
        return {"GPU": self._shares.per_task}

    def launch(self) -> Launch:
        launch = super().launch()
        if self._auto_set_gpu and not self._shares.are_given:
            return launch
        return replace(launch, gpus=self._shares.of(self._local_rank * self._auto_set_gpu))


def _hosts_by_rank(
    variables: LauncherVariables,
    hosts: list[str],
    size: int,
    tasks_per_node: int | Mapping[str, int] | None,
) -> list[str | None]:
    """The host of each task, or Nones where the way of placing them does not tell."""
    text = variables.find(*_TASKS_PER_NODE)
    placing = variables.find("SLURM_DISTRIBUTION") or "block"
    if tasks_per_node is not None:
        counts = _counts(hosts, tasks_per_node)
        said = f"tasks per node {tasks_per_node!r} (`tasks_per_node`)"
    elif text is None or not placing.startswith("block"):
        return [None] * size
    else:
        counts = expand_counts(text)
        said = f"tasks per node {text!r} ({' or '.join(_TASKS_PER_NODE)})"
    if len(counts) != len(hosts) or sum(counts) != size:
        raise ClusterError(
            f"SLURM's variables contradict each other: {size} tasks ({' or '.join(_TASKS)}), "
            f"{said}, but the hosts {', '.join(hosts)}. Start the script with srun in the "
            "allocation that set them."
        )
    return [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]


def _counts(hosts: list[str], tasks_per_node: int | Mapping[str, int]) -> list[int]:
    if not isinstance(tasks_per_node, Mapping):
        return [int(tasks_per_node)] * len(hosts)
    if set(tasks_per_node) != set(hosts):
        raise ClusterError(
            f"`tasks_per_node` must have a number for each of the hosts {', '.join(hosts)}; got "
            f"{dict(tasks_per_node)}."
        )
    return [int(tasks_per_node[host]) for host in hosts]


def _most_tasks(placement: list[str | None], size: int) -> int:
    """The number of tasks of the host with the most, as far as is known."""
    return size if None in placement else max(Counter(placement).values())


def _addresses(
    first: Address, placement: list[str | None], job: str, port_base: int | None
) -> list[str | None]:
    """The address of task 0, and one for each of the others, who have no use for it."""
    ports = itertools.count(derived_port(job) + 1)
    seen: Counter[str | None] = Counter(placement[:1])
    others: list[str | None] = []
    for host in placement[1:]:
        port = next(ports) if port_base is None else port_base + seen[host]
        seen[host] += 1
        others.append(host and str(Address(host, port)))
    return [str(first), *others]


def named_tasks(jobs: Mapping[str, int] | None, size: int) -> list[tuple[str, int]]:
    """Returns the job and the number of each of `size` tasks, by rank."""
    counts = {"worker": size} if jobs is None else dict(jobs)
    if sum(counts.values()) != size:
        raise ClusterError(
            f"`jobs` has {sum(counts.values())} tasks, but {size} were started. Make the numbers "
            "equal."
        )
    unknown = [job for job in counts if job not in JOBS]
    if unknown:
        raise ClusterError(
            f"The jobs of a cluster are {', '.join(JOBS)}; got {unknown[0]!r}. Use these names."
        )
    return [(job, index) for job in sorted(counts) for index in range(counts[job])]


def spec_of(named: Sequence[tuple[str, int]], addresses: Sequence[str | None]) -> ClusterSpec:
    """Returns the cluster of tasks with their addresses, both by rank."""
    tasks: dict[str, list[str | None]] = {}
    for (job, _), address in zip(named, addresses, strict=True):
        tasks.setdefault(job, []).append(address)
    return ClusterSpec(tasks)


@dataclass(frozen=True)
class SharedGpus:
    """How the tasks of a host share its GPUs."""

    gpus_per_node: int | None
    gpus_per_task: int | None
    most_tasks: int

    def __post_init__(self) -> None:
        if self.are_given and self.per_task * self.most_tasks > self._per_node:
            raise ClusterError(
                f"{self.most_tasks} tasks per host with {self.per_task} GPUs each need more GPUs "
                f"than the {self._per_node} of a host. Lower `gpus_per_task`, or start fewer tasks "
                "per host."
            )

    @property
    def are_given(self) -> bool:
        """Whether the program itself says how they are shared."""
        return self.gpus_per_node is not None or self.gpus_per_task is not None

    @property
    def _per_node(self) -> int:
        return len(this_machine().gpus) if self.gpus_per_node is None else self.gpus_per_node

    @property
    def per_task(self) -> int:
        """How many GPUs each task uses."""
        even = self._per_node // self.most_tasks
        return even if self.gpus_per_task is None else self.gpus_per_task

    def of(self, local_rank: int) -> tuple[int, ...]:
        """Returns the GPUs of one of the tasks of a host."""
        return tuple(range(local_rank * self.per_task, (local_rank + 1) * self.per_task))
