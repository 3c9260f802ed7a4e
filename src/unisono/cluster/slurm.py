"""The variables that SLURM's srun sets for each task, and which GPUs of its host a task uses."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping

from unisono.cluster.launchers import LauncherVariables
from unisono.cluster.resolver import KnownCluster, Launch
from unisono.cluster.spec import Address, ClusterSpec, derived_port, validate
from unisono.devices.machine import this_machine
from unisono.errors import ClusterError

_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# A comma that is not inside brackets.
_COMMA = re.compile(r",(?![^\[]*\])")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_BRACKETS = re.compile(r"([^][]*)(?:\[([^][]*)\](.*))?")


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
        first = variables.coordinator(job, hosts[0], port_base)
        assert first is not None
        placement = _hosts_by_rank(variables, hosts, size, tasks_per_node)
        named = _named_tasks(jobs, size)
        super().__init__(*named[rank], rpc_layer=rpc_layer, environment="slurm")
        tasks: dict[str, list[str | None]] = {}
        addresses = _addresses(first, placement, job, port_base)
        for (name, _), address in zip(named, addresses, strict=True):
            tasks.setdefault(name, []).append(address)
        self._spec = ClusterSpec(tasks)
        validate(self._spec, *named[rank])
        local_rank, gpus = variables.number_or(0, "SLURM_LOCALID"), None
        is_share_given = gpus_per_node is not None or gpus_per_task is not None
        if is_share_given or not auto_set_gpu:
            most_tasks = size if None in placement else max(Counter(placement).values())
            share = _gpus_per_task(gpus_per_node, gpus_per_task, most_tasks)
            before = share * local_rank if auto_set_gpu else 0
            gpus = tuple(range(before, before + share))
            self._num_accelerators = {"GPU": share} if is_share_given else None
        host = placement[rank]
        self._launch = Launch(
            job,
            local_rank=local_rank,
            local_size=local_rank + 1 if host is None else placement.count(host),
            restart_count=variables.number_or(0, "SLURM_RESTART_COUNT"),
            gpus=gpus,
        )

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job of this process and its number there."""
        return self.task_type, self.task_id


def _hosts_by_rank(
    variables: LauncherVariables,
    hosts: list[str],
    size: int,
    tasks_per_node: int | Mapping[str, int] | None,
) -> list[str | None]:
    """The host of each task, or Nones where the way of placing them does not tell."""
    text = variables.find(*_TASKS_PER_NODE)
    placing = variables.find("SLURM_DISTRIBUTION") or "block"
    said = f"tasks per node {tasks_per_node!r} (`tasks_per_node`)"
    if isinstance(tasks_per_node, Mapping):
        if set(tasks_per_node) != set(hosts):
            raise ClusterError(
                f"`tasks_per_node` must have a number for each of the hosts {', '.join(hosts)}; "
                f"got {dict(tasks_per_node)}."
            )
        counts = [int(tasks_per_node[host]) for host in hosts]
    elif tasks_per_node is not None:
        counts = [int(tasks_per_node)] * len(hosts)
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


def _named_tasks(jobs: Mapping[str, int] | None, size: int) -> list[tuple[str, int]]:
    """Returns the job and the number of each of `size` tasks, by rank."""
    counts = {"worker": size} if jobs is None else dict(jobs)
    if sum(counts.values()) != size:
        raise ClusterError(
            f"`jobs` has {sum(counts.values())} tasks, but {size} were started. Make the numbers "
            "equal."
        )
    return [(job, index) for job in sorted(counts) for index in range(counts[job])]


def _gpus_per_task(gpus_per_node: int | None, gpus_per_task: int | None, most_tasks: int) -> int:
    """Returns how many GPUs each task uses, of a host with the most tasks."""
    per_node = len(this_machine().gpus) if gpus_per_node is None else gpus_per_node
    per_task = per_node // most_tasks if gpus_per_task is None else gpus_per_task
    if per_task * most_tasks > per_node:
        raise ClusterError(
            f"{most_tasks} tasks per host with {per_task} GPUs each need more GPUs than the "
            f"{per_node} of a host. Lower `gpus_per_task`, or start fewer tasks per host."
        )
    return per_task


# The short forms in which SLURM writes lists of hosts and of counts. `scontrol show hostnames`
# expands hosts, too, but containers of a job often have no `scontrol`, and it knows no counts.


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of `node[01-03,7],login`: node01, node02, node03, node7, login."""
    hosts = [host for part in _COMMA.split(text.strip()) for host in _expand(part)]
    if not all(hosts):
        raise ClusterError(
            f"Cannot read the list of hosts {text!r}. Write it as SLURM does, for example "
            "'node[01-03,7],login'."
        )
    return hosts


def expand_counts(text: str) -> list[int]:
    """Returns the counts of `2(x3),1`: 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ClusterError(
                f"Cannot read {part!r} in the tasks per node {text!r}. Write them as SLURM does, "
                "for example '2(x3),1'."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand(part: str) -> list[str]:
    """Expands the first pair of brackets, and then those that follow it; "" is unreadable."""
    if (found := _BRACKETS.fullmatch(part)) is None:
        return [""]
    before, inside, after = found.groups()
    if inside is None:
        return [before]
    numbers = [number for piece in inside.split(",") for number in _numbers(piece)]
    ends = _expand(after)
    return [before + number + end if number else "" for number in numbers for end in ends]


def _numbers(piece: str) -> list[str]:
    if (found := _RANGE.fullmatch(piece)) is None:
        return [""]
    first, last = found[1], found[2] or found[1]
    return [f"{one:0{len(first)}}" for one in range(int(first), int(last) + 1)] or [""]
