"""Starts the processes of an MPI job on hosts that are network namespaces."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from unisono.testing.namespaces import Hosts

# Takes the place of ssh: goes to the namespace of a host, and gives the host its own name.
_AGENT = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
number=$(( ${{1##*.}} - 1 )); shift
exec ip netns exec {prefix}$number unshare --uts bash -c "hostname host$number; $*"
"""
# Open MPI refuses otherwise to start for root, and would not let other processes have the core.
_WISHES = [
    "OMPI_ALLOW_RUN_AS_ROOT=1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "OMPI_MCA_mpi_yield_when_idle=1",
]


def mpirun_between(hosts: Hosts, mpirun: Sequence[str], num_ranks: int, folder: Path) -> list[str]:
    """Returns the command that starts processes on hosts, to which the program is to be added.

    Args:
        hosts: Where the processes run, in equal numbers.
        mpirun: The launcher of Open MPI or MPICH, perhaps with options.
        num_ranks: How many processes there are.
        folder: Where a script may be written, which must stay until the processes have started.
    """
    agent = folder / "agent"
    agent.write_text(_AGENT.format(prefix=hosts.names[0].removesuffix("0")))
    agent.chmod(0o700)
    per_host = num_ranks // len(hosts.names)
    places = ",".join(f"{hosts.address(i)}:{per_host}" for i in range(len(hosts.names)))
    if is_open_mpi(mpirun):
        options = ["--prtemca", "plm_ssh_agent", str(agent)]
        options += ["--prtemca", "plm_ssh_no_tree_spawn", "1", "--host", places]
        options += ["--map-by", f"ppr:{per_host}:node:oversubscribe", "--bind-to", "none"]
    else:
        options = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", places]
    inside = ["ip", "netns", "exec", hosts.names[0], "unshare", "--uts", "env", *_WISHES]
    named = ["bash", "-c", 'hostname host0; exec "$@"', "mpirun"]
    return [*inside, *named, *mpirun, *options, "-n", str(num_ranks)]


def is_open_mpi(mpirun: Sequence[str]) -> bool:
    """Returns whether a launcher is that of Open MPI, whose options differ from MPICH's."""
    told = subprocess.run(
        [*mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return "Open MPI" in told.stdout + told.stderr
