"""`contrib.CollectiveAllReduceStrategy`."""

from __future__ import annotations

from unisono.arguments import check_int
from unisono.cluster import ClusterSpec, SimpleClusterResolver
from unisono.devices import resolve
from unisono.errors import DeviceError
from unisono.strategies import MultiWorkerMirroredStrategy


class CollectiveAllReduceStrategy(MultiWorkerMirroredStrategy):
    """Trains on the devices of this process, and after `configure` on those of a whole cluster.

    It is `MultiWorkerMirroredStrategy` under its older name, which asks no launcher.

    Args:
        num_gpus_per_worker: How many GPUs each worker has; 0 means one CPU replica.
    """

    def __init__(self, num_gpus_per_worker: int = 0) -> None:
        if check_int("num_gpus_per_worker", num_gpus_per_worker) < 0:
            raise DeviceError(
                f"`num_gpus_per_worker` must be 0 or more, got {num_gpus_per_worker}."
            )
        if num_gpus_per_worker > 0:
            # The last one first: there may be far fewer.
            resolve(f"cuda:{num_gpus_per_worker - 1}")
        gpus = [f"cuda:{index}" for index in range(num_gpus_per_worker)]
        super().__init__(SimpleClusterResolver(ClusterSpec({})), devices=gpus or ["cpu:0"])
