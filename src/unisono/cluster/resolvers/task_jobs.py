"""Which jobs the tasks of a launcher belong to, and which GPUs of its host each task uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.cluster.rules import JOBS
from unisono.cluster.spec import ClusterSpec
from unisono.devices.machine import this_machine
from unisono.errors import ClusterError


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
