"""The variables of a pod of an Indexed Job of Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from unisono.cluster.environment import COORDINATOR, LauncherVariables, coordinator_address
from unisono.cluster.resolvers.resolver import KnownCluster, Launch
from unisono.cluster.spec import Address, ClusterSpec
from unisono.errors import ClusterError

NUM_WORKERS = "UNISONO_NUM_WORKERS"


class KubernetesClusterResolver(KnownCluster):
    """A pod of an Indexed Job, alone or in a JobSet: worker JOB_COMPLETION_INDEX of the job.

    Kubernetes numbers the pods. The manifest says the rest: UNISONO_NUM_WORKERS, the number of
    pods, and UNISONO_COORDINATOR, host:port of pod 0, or MASTER_ADDR alone. If pod 0 is called
    NAME-0.SERVICE, the others are NAME-1.SERVICE and so on, with the same port: in an elastic job,
    a pod that comes back finds them there. Only the environment is read, so a pod needs no access
    to the API of the cluster.

    Args:
        environ: The environment variables; those of this process if not given.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        variables = LauncherVariables("an Indexed Job of Kubernetes", environ)
        rank, size = variables.rank_and_size(("JOB_COMPLETION_INDEX",), (NUM_WORKERS,))
        first = coordinator_address(variables, "kubernetes", None, port=None)
        if first is None:
            raise ClusterError(
                f"The manifest says that {size} pods train together, but not where pod 0 is. Set "
                f"{COORDINATOR} in it, for example 'JOB-0.SERVICE:29500', where SERVICE is a "
                "headless service and the `subdomain` of the pods."
            )
        super().__init__("worker", rank, environment="kubernetes")
        addresses = [str(first), *(_address_of(rank, first) for rank in range(1, size))]
        self._spec = ClusterSpec({"worker": addresses})
        self._launch = Launch(job=f"kubernetes-{first}")


def _address_of(rank: int, first: Address) -> str | None:
    """Returns the address of another pod, if the name of pod 0 tells it."""
    host, is_numbered = re.subn(r"^([^.]+)-0(?=\.)", rf"\g<1>-{rank}", first.host)
    return str(Address(host, first.port)) if is_numbered else None
