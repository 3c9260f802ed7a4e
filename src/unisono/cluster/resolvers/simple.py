"""A cluster that the program itself describes."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.arguments import check_instance, check_optional
from unisono.cluster.resolvers.resolver import KnownCluster
from unisono.cluster.rules import validate
from unisono.cluster.spec import ClusterSpec, Tasks


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

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See `ClusterResolver.master`; without a task, the `master` given at the start."""
        if task_type is None and task_id is None and self._master:
            return self._master
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """See `ClusterResolver.num_accelerators`; the numbers given at the start hold for all."""
        if self._num_accelerators is not None:
            return dict(self._num_accelerators)
        return super().num_accelerators(task_type, task_id)
