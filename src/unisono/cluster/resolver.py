"""What every cluster resolver answers, and the two that a program builds itself."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.arguments import check_instance, check_int, check_optional
from unisono.cluster.spec import JOBS, Address, ClusterSpec, Tasks, validate
from unisono.devices.machine import this_machine
from unisono.errors import ClusterError


@dataclass(frozen=True)
class Launch:
    """What a launcher says beyond the cluster spec."""

    job: str
    local_rank: int = 0
    local_size: int = 1
    restart_count: int = 0
    uses_existing_store: bool = False
    gpus: tuple[int, ...] | None = None


class ClusterResolver(ABC):
    """Says which cluster this process belongs to, and which task it is.

    The attributes may be set; they then count instead of what was found.

    Attributes:
        task_type: The job of this process, or None if it is alone.
        task_id: Its number in the job, or None if it is alone.
        rpc_layer: A protocol to write before the address that `master` returns, or None.
        environment: A free text on where the cluster runs.
    """

    # What a resolver may know from the start.
    _launch: Launch | None = None
    _num_accelerators: Mapping[str, int] | None = None

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str = "",
    ) -> None:
        _check_task(task_type, task_id, rpc_layer)
        check_optional("environment", environment, str, "a text")
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer
        self.environment = environment

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the cluster; an empty spec if this process is alone."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task; "" if the process is alone.

        Args:
            task_type: The job of the task; that of this process if None.
            task_id: Its number there; that of this process if None.
            rpc_layer: A protocol to put before the address, as in "grpc://host:2222".
        """
        _check_task(task_type, task_id, rpc_layer)
        if (told := self._told_master(task_type, task_id, rpc_layer)) is not None:
            return told
        spec = self.cluster_spec()
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if not spec or task_type is None or task_id is None:
            return ""
        protocol = self.rpc_layer if rpc_layer is None else rpc_layer
        address = spec.task_address(task_type, task_id)
        return f"{protocol}://{address}" if protocol else address

    def _told_master(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None
    ) -> str | None:
        """Returns what `master` does, if it does not follow from the spec."""
        return None

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Returns how many GPUs this process sees, by kind.

        Args:
            task_type: The job of this process, or None.
            task_id: Its number there, or None.

        Raises:
            ClusterError: If another task is asked for, unless the numbers were given at the start.
        """
        _check_task(task_type, task_id)
        if self._num_accelerators is not None:
            return dict(self._num_accelerators)
        asked = (task_type or self.task_type, self.task_id if task_id is None else task_id)
        if asked != (self.task_type, self.task_id):
            raise ClusterError(
                f"Only the GPUs of this process, {self.task_type} {self.task_id}, are known here, "
                f"not those of {asked[0]} {asked[1]}. Call it in that process."
            )
        return {"GPU": len(this_machine().gpus)}

    def launch(self) -> Launch:
        """Returns what is known beyond the spec; by default that which the spec itself tells."""
        if self._launch is not None:
            return self._launch
        spec = self.cluster_spec()
        hosts: dict[tuple[str | None, int | None], str] = {
            (job, task_id): Address.parse(address).host
            for job in sorted(spec.jobs, key=JOBS.index)
            for task_id, address in enumerate(spec.job_tasks(job))
            if address is not None
        }
        here = (self.task_type, self.task_id)
        tasks = [task for task, host in hosts.items() if host == hosts.get(here)] or [here]
        cluster = json.dumps(spec.as_dict(), sort_keys=True)
        job = f"cluster-{hashlib.sha256(cluster.encode()).hexdigest()[:16]}"
        return Launch(job, local_rank=tasks.index(here), local_size=len(tasks))


class KnownCluster(ClusterResolver):
    """A resolver that knows its cluster from the start."""

    _spec: ClusterSpec

    def cluster_spec(self) -> ClusterSpec:
        return self._spec


class SimpleClusterResolver(KnownCluster):
    """A cluster spec and a task, given as arguments.

    Args:
        cluster_spec: The tasks of the cluster.
        master: What `master()` returns when no task is named there.
        task_type: The job of this process.
        task_id: Its number in the job.
        environment: A free text on where the cluster runs.
        num_accelerators: What `num_accelerators()` returns, such as `{"GPU": 2}`; counted if not
            given.
        rpc_layer: A protocol to write before addresses.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Tasks],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        check_instance("master", master, str, "a text")
        check_optional("num_accelerators", num_accelerators, Mapping, "a dict, such as {'GPU': 2}")
        self._spec = ClusterSpec(cluster_spec)
        self._master = master
        self._num_accelerators = num_accelerators
        if task_type is not None or task_id is not None:
            validate(self._spec, task_type, task_id)

    def _told_master(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None
    ) -> str | None:
        return self._master or None if task_type is None and task_id is None else None


class UnionClusterResolver(ClusterResolver):
    """The tasks of several clusters as one cluster. Everything else comes from the first resolver.

    The lists of a job that several resolvers know are put end to end. If one of them gives the
    tasks of the job by number, all are taken by number, and no two may have the same.

    Args:
        *args: The resolvers.
        task_type: Counts instead of the task type of the first resolver.
        task_id: Counts instead of the task id of the first resolver.
        rpc_layer: Counts instead of that of the first resolver.
    """

    def __init__(
        self,
        *args: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        wrong = [one for one in args if not isinstance(one, ClusterResolver)]
        if not args or wrong:
            found = repr(wrong[0]) if wrong else "none"
            raise ClusterError(
                "A union needs at least one cluster resolver, and cluster resolvers alone; got "
                f"{found}."
            )
        first = args[0]
        super().__init__(
            first.task_type if task_type is None else task_type,
            first.task_id if task_id is None else task_id,
            first.rpc_layer if rpc_layer is None else rpc_layer,
            first.environment,
        )
        self._resolvers = args

    def cluster_spec(self) -> ClusterSpec:
        specs = [resolver.cluster_spec() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for spec in specs for job in spec.jobs)
        return ClusterSpec({job: _merged(job, specs) for job in jobs})

    def _told_master(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None
    ) -> str | None:
        is_asked = task_type is not None and task_id is not None
        return None if is_asked else self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        return self._resolvers[0].num_accelerators(task_type, task_id)

    def launch(self) -> Launch:
        """See `ClusterResolver.launch`; the first resolver says so if it has the whole cluster."""
        first = self._resolvers[0]
        return first.launch() if first.cluster_spec() == self.cluster_spec() else super().launch()


def _merged(job: str, specs: list[ClusterSpec]) -> Tasks:
    of_job = [spec for spec in specs if job in spec.jobs]
    if all(spec.is_dense(job) for spec in of_job):
        return [address for spec in of_job for address in spec.job_tasks(job)]
    merged: dict[int, str | None] = {}
    for spec in of_job:
        tasks = spec.job_tasks(job)
        numbered = {index: tasks[index] for index in spec.task_indices(job)}
        twice = merged.keys() & numbered.keys()
        if twice:
            raise ClusterError(
                f"Several clusters of the union have task {min(twice)} of the job {job!r}. Give "
                "each task a number that no other cluster uses."
            )
        merged.update(numbered)
    return merged


def _check_task(task_type: str | None, task_id: int | None, rpc_layer: str | None = None) -> None:
    check_optional("task_type", task_type, str, "a text, such as 'worker', or None")
    check_optional("rpc_layer", rpc_layer, str, "a text, such as 'grpc', or None")
    if task_id is not None:
        check_int("task_id", task_id)
