"""The place of this process among all workers of its job."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.cluster import rules
from unisono.cluster.resolvers.resolver import ClusterResolver
from unisono.cluster.spec import Address, ClusterSpec


@dataclass(frozen=True)
class Membership:
    """The same ranks for every launcher: the chief first, then the workers."""

    rank: int
    size: int
    coordinator_host: str
    coordinator_port: int
    job: str
    restart_count: int
    uses_existing_store: bool
    local_rank: int
    local_size: int
    task_type: str | None
    task_id: int | None
    spec: ClusterSpec
    coordinator_rank: int = 0
    gpus: tuple[int, ...] | None = None

    @staticmethod
    def of(resolver: ClusterResolver) -> Membership:
        """Returns the place that the cluster and the task of a resolver give."""
        spec, task = resolver.cluster_spec(), (resolver.task_type, resolver.task_id)
        size = rules.worker_count(spec, *task)
        launch = resolver.launch()
        first = Address("", 0)
        if size > 1:
            first = Address.parse(spec.task_address(rules.leading_job(spec), 0))
        return Membership(
            rank=rules.id_in_cluster(spec, *task),
            size=size,
            coordinator_host=first.host,
            coordinator_port=first.port,
            job=launch.job,
            restart_count=launch.restart_count,
            uses_existing_store=launch.uses_existing_store and size > 1,
            local_rank=launch.local_rank,
            local_size=launch.local_size,
            task_type=resolver.task_type,
            task_id=resolver.task_id,
            spec=spec,
            gpus=launch.gpus,
        )

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and summaries."""
        return rules.is_chief(self.spec, self.task_type, self.task_id)

    @property
    def coordinator(self) -> str:
        """The address of the store, as it is written."""
        return str(Address(self.coordinator_host, self.coordinator_port))
