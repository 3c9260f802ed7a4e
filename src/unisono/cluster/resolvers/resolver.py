"""What every cluster resolver answers."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass

from unisono.arguments import check_int, check_optional
from unisono.cluster.rules import JOBS
from unisono.cluster.spec import Address, ClusterSpec
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

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str = "",
    ) -> None:
        check_task(task_type, task_id, rpc_layer)
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
        check_task(task_type, task_id, rpc_layer)
        spec = self.cluster_spec()
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if not spec or task_type is None or task_id is None:
            return ""
        protocol = self.rpc_layer if rpc_layer is None else rpc_layer
        address = spec.task_address(task_type, task_id)
        return f"{protocol}://{address}" if protocol else address

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Returns how many GPUs this process sees, by kind.

        Args:
            task_type: The job of this process, or None.
            task_id: Its number there, or None.

        Raises:
            ClusterError: If another task is asked for: nothing is known of it.
        """
        check_task(task_type, task_id)
        asked = (task_type or self.task_type, self.task_id if task_id is None else task_id)
        if asked != (self.task_type, self.task_id):
            raise ClusterError(
                f"Only the GPUs of this process, {self.task_type} {self.task_id}, are known here, "
                f"not those of {asked[0]} {asked[1]}. Call it in that process."
            )
        return {"GPU": len(this_machine().gpus)}

    def launch(self) -> Launch:
        """Returns what is known beyond the spec; by default that which the spec itself tells."""
        spec = self.cluster_spec()
        here, neighbors = (self.task_type, self.task_id), _tasks_by_host(spec)
        tasks = next((tasks for tasks in neighbors.values() if here in tasks), [here])
        cluster = json.dumps(spec.as_dict(), sort_keys=True)
        job = f"cluster-{hashlib.sha256(cluster.encode()).hexdigest()[:16]}"
        return Launch(job, local_rank=tasks.index(here), local_size=len(tasks))


class KnownCluster(ClusterResolver):
    """A resolver that knows its cluster, and perhaps what the launcher says, from the start."""

    _spec: ClusterSpec
    _launch: Launch | None = None

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    def launch(self) -> Launch:
        return super().launch() if self._launch is None else self._launch


def check_task(task_type: str | None, task_id: int | None, rpc_layer: str | None = None) -> None:
    """Raises unless these can name a task, or are None."""
    check_optional("task_type", task_type, str, "a text, such as 'worker', or None")
    check_optional("rpc_layer", rpc_layer, str, "a text, such as 'grpc', or None")
    if task_id is not None:
        check_int("task_id", task_id)


def _tasks_by_host(spec: ClusterSpec) -> dict[str, list[tuple[str | None, int | None]]]:
    hosts: dict[str, list[tuple[str | None, int | None]]] = {}
    for job in sorted(spec.jobs, key=JOBS.index):
        for task_id, address in enumerate(spec.job_tasks(job)):
            if address is not None:
                hosts.setdefault(Address.parse(address).host, []).append((job, task_id))
    return hosts
