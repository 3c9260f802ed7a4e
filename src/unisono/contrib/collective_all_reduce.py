"""`contrib.CollectiveAllReduceStrategy`."""

from __future__ import annotations

from unisono.cluster import ClusterSpec, SimpleClusterResolver
from unisono.contrib.strategies import local_devices
from unisono.options import CommunicationImplementation, CommunicationOptions
from unisono.strategies import MultiWorkerMirroredStrategy


class CollectiveAllReduceStrategy(MultiWorkerMirroredStrategy):
    """Trains on the devices of this process, and after `configure` on those of a whole cluster.

    It is `MultiWorkerMirroredStrategy` under its older name, which asks no launcher.

    Args:
        num_gpus_per_worker: How many GPUs each worker has; 0 means one CPU replica.
        communication: Who carries a collective between workers; a member of
            `CommunicationImplementation` or its name.
    """

    def __init__(
        self,
        num_gpus_per_worker: int = 0,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        implementation = CommunicationImplementation.read(communication, "communication")
        super().__init__(
            SimpleClusterResolver(ClusterSpec({})),
            CommunicationOptions(implementation=implementation),
            devices=local_devices(num_gpus_per_worker),
        )
