"""The place of this process among all workers of its job."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.cluster.resolver import ClusterResolver, Launch
from unisono.cluster.spec import Address, ClusterSpec, count, rank_of


@dataclass(frozen=True, kw_only=True)
class Membership(Launch):
    """What the launcher says, and the same ranks for every one: the chief first, then workers."""

    rank: int
    size: int
    coordinator: Address
    coordinator_rank: int = 0
    task_type: str | None
    task_id: int | None
    spec: ClusterSpec

    @staticmethod
    def of(resolver: ClusterResolver) -> Membership:
        """Returns the place that the cluster and the task of a resolver give."""
        spec, task = resolver.cluster_spec(), (resolver.task_type, resolver.task_id)
        rank = rank_of(spec, *task)
        is_in_row = bool(spec) and resolver.task_type != "evaluator"
        size = count(spec, "chief") + count(spec, "worker") if is_in_row else 1
        launch = vars(resolver.launch())
        first = spec.task_address(_leading_job(spec), 0) if size > 1 else None
        return Membership(
            **launch | {"uses_existing_store": launch["uses_existing_store"] and size > 1},
            rank=rank,
            size=size,
            coordinator=Address("", 0) if first is None else Address.parse(first),
            task_type=resolver.task_type,
            task_id=resolver.task_id,
            spec=spec,
        )

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and summaries."""
        return self.rank == 0

    @property
    def leader(self) -> str:
        """The device name of the first task in the row, or "" for a process that is alone."""
        if not self.spec or self.task_type == "evaluator":
            return ""
        return f"/job:{_leading_job(self.spec)}/replica:0/task:0"


def _leading_job(spec: ClusterSpec) -> str:
    return "chief" if "chief" in spec.jobs else "worker"
