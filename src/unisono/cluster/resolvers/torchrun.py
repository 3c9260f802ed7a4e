"""The variables that torchrun, and launchers like it, set for each worker."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.cluster.environment import LauncherVariables
from unisono.cluster.resolvers.resolver import KnownCluster, Launch
from unisono.cluster.spec import Address, ClusterSpec


class TorchrunClusterResolver(KnownCluster):
    """A worker that torchrun has started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    LOCAL_RANK, LOCAL_WORLD_SIZE and the variables TORCHELASTIC_* are used where they are set.

    Args:
        environ: The environment variables; those of this process if not given.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        variables = LauncherVariables("torchrun", environ)
        rank, size = variables.rank_and_size(("RANK",), ("WORLD_SIZE",))
        local_rank, local_size = _local(variables)
        address = str(Address(variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")))
        super().__init__("worker", rank, environment="torchrun")
        self._spec = ClusterSpec({"worker": [address, *[None] * (size - 1)]})
        # The run id alone is "none" in every job that gives no address for a rendezvous.
        self._launch = Launch(
            job=f"torchrun-{variables.find('TORCHELASTIC_RUN_ID') or 'none'}@{address}",
            local_rank=local_rank,
            local_size=local_size,
            restart_count=variables.number_or(0, "TORCHELASTIC_RESTART_COUNT"),
            uses_existing_store=variables.find("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def _local(variables: LauncherVariables) -> tuple[int, int]:
    if variables.find("LOCAL_WORLD_SIZE") is not None:
        return variables.rank_and_size(("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
    # Started by hand: the neighbors before this worker are all that is known.
    local_rank = variables.number_or(0, "LOCAL_RANK")
    return local_rank, local_rank + 1
