"""Where the first worker can be reached, for launchers that do not tell."""

from __future__ import annotations

from unisono.cluster.address import Address, derived_port
from unisono.cluster.environment import LauncherVariables

COORDINATOR = "UNISONO_COORDINATOR"


def coordinator_address(
    variables: LauncherVariables, job: str, host: str | None, port: int | None
) -> Address | None:
    """Returns the address of rank 0, or None if nobody tells its host.

    UNISONO_COORDINATOR comes first, then MASTER_ADDR and MASTER_PORT, then the host and the port
    given; without a port, one derived from the name of the job.
    """
    whole = variables.find(COORDINATOR)
    if whole is not None:
        return Address.parse(whole)
    named = variables.find("MASTER_ADDR") or host
    if named is None:
        return None
    return Address(named, port or variables.number_or(derived_port(job), "MASTER_PORT"))
