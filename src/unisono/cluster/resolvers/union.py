"""Several resolvers as one."""

from __future__ import annotations

from unisono.cluster.resolvers.resolver import ClusterResolver, Launch
from unisono.cluster.spec import ClusterSpec, Tasks
from unisono.errors import ClusterError


class UnionClusterResolver(ClusterResolver):
    """The tasks of several clusters as one cluster. Everything else comes from the first resolver.

    The lists of a job that several resolvers know are put end to end. If one of them gives the
    tasks of the job by number, all are taken by number, and no two may have the same.

    Args:
        *args: The resolvers.
        task_type: Counts instead of the task type of the first resolver.
        task_id: Counts instead of the task id of the first resolver.
        rpc_layer: Counts instead of that of the first resolver.

    Raises:
        ClusterError: If there is no resolver, or something else is given.
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
        """See `ClusterResolver.cluster_spec`.

        Raises:
            ClusterError: If two resolvers give the same number to tasks of one job.
        """
        specs = [resolver.cluster_spec() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for spec in specs for job in spec.jobs)
        return ClusterSpec({job: _merged(job, specs) for job in jobs})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See `ClusterResolver.master`; without a task, what the first resolver returns."""
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """See `ClusterResolver.num_accelerators`; the first resolver says so."""
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
